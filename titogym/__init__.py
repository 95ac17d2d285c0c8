"""titogym: an agent-environment gym for reinforcement learning of LLM agents.

The code lives in the top-level folders of the repository; each appears here as a subpackage:

- `titogym.templates`: model families, chat templates, tokenizers, template verification.
- `titogym.gateway`: the OpenAI-compatible serving gateway that keeps the exact sampled tokens.
- `titogym.envs`: tasks, graders and sandboxes.
- `titogym.harnesses`: how each agent program is launched, and the episode that runs it.
- `titogym.trainer`: rollout workers, buffer, losses, backends, weight transports and drivers.
"""

__version__ = "0.1.0"
