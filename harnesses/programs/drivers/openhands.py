"""Drives the OpenHands SDK: its default agent, without a browser. Limits are the gateway's."""

import os

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent

llm = LLM(
    model=f"openai/{os.environ['OPENAI_MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    num_retries=1,
)
conversation = Conversation(
    get_default_agent(llm, cli_mode=True), workspace=os.getcwd(), max_iteration_per_run=1_000_000
)
with open(os.environ["TITOGYM_INSTRUCTION_FILE"], encoding="utf-8") as file:
    conversation.send_message(file.read())
conversation.run()
