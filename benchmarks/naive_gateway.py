"""What a session gateway looks like when nobody thought of its cost: the yardstick of `gateway.py`.

    python benchmarks/naive_gateway.py --model-dir DIR --engine URL

Every node of a session holds its whole row, its mask and its log-probs, and all messages up to it. Every
request renders and tokenises its whole conversation (with Hugging Face's tokenizers, as most servers do),
and walks the tree to find where it belongs.
It serves what the benchmark needs: sessions, and chat completions without streaming. Prints its URL.
"""

import argparse
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titogym.gateway.protocols.chat import messages as canonical
from titogym.gateway.protocols.chat import wire_message
from titogym.gateway.tokens.parsers.answer import AnswerParser
from titogym.templates.conversation import Message, Prefix
from titogym.templates.model import ModelAssets, load_model_assets


@dataclass
class Node:
    messages: list[Message]
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    children: list["Node"] = field(default_factory=list)


class NaiveGateway:
    def __init__(self, assets: ModelAssets, engine: str) -> None:
        self._assets = assets
        self._engine = httpx.AsyncClient(base_url=engine, timeout=60)
        self._roots: dict[str, Node] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/sessions", self.create, methods=["POST"]),
            Route("/sessions/{id}/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        id = uuid.uuid4().hex
        self._roots[id] = Node([], [], [], [])
        return JSONResponse({"id": id, "base_url": f"{request.base_url}sessions/{id}/v1", "api_key": id}, 201)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        messages = list(canonical(body["messages"]))
        prefix = Prefix(tools=tuple(body.get("tools") or ()))
        parent = self._find(self._roots[request.path_params["id"]], messages)
        rendered = self._assets.encode(messages, prefix, add_generation_prompt=True)
        known = len(parent.tokens)
        tokens = rendered if rendered[:known] == parent.tokens else [*parent.tokens, *rendered[known:]]
        answer = await self._engine.post(
            "/generate",
            json={
                "input_ids": tokens,
                "sampling_params": {"max_new_tokens": 1024, "temperature": 1.0},
                "return_logprob": True,
            },
        )
        output = answer.json()
        ids = output["output_ids"]
        parser = AnswerParser(
            self._assets.family, self._assets.tokenizer, stop_ids=self._assets.stop_ids, tools=prefix.tools
        )
        parser.push(ids)
        parser.finish()
        message = parser.message()
        sampled = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        fresh = len(tokens) - known
        parent.children.append(
            Node(
                messages=[*messages, message],
                tokens=tokens + ids,
                mask=parent.mask + [0] * fresh + [1] * len(ids),
                logprobs=parent.logprobs + [0.0] * fresh + sampled,
            )
        )
        return JSONResponse(
            {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": "naive",
                "choices": [{"index": 0, "message": wire_message(message), "finish_reason": "stop"}],
                "usage": {"prompt_tokens": len(tokens), "completion_tokens": len(ids)},
            }
        )

    def _find(self, node: Node, messages: list[Message]) -> Node:
        """The deepest node whose conversation the request repeats: looks at every node."""
        best = node
        for child in node.children:
            found = self._find(child, messages)
            if found.messages == messages[: len(found.messages)] and len(found.messages) > len(best.messages):
                best = found
        return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, help="model folder with tokenizer.json")
    parser.add_argument("--engine", required=True, help="base URL of the engine")
    parser.add_argument("--family", help="template family; default: recognised")
    options = parser.parse_args()
    gateway = NaiveGateway(load_model_assets(options.model_dir, options.family), options.engine)
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    app = Starlette(routes=gateway.routes())
    uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()
