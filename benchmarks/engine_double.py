"""An inference engine that takes no time to think: SGLang's wire format with one answer, again and again.

    python benchmarks/engine_double.py --answer 5,6,7 [--routes LAYERS,TOP_K]

A bare protocol over sockets, so that what a benchmark measures is the gateway before it. Prints its URL.
"""

import argparse
import asyncio
import base64
import sys
from typing import Any

import orjson

_CONTEXT = 1 << 20
_TOKENS_PER_EVENT = 8


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, answer: list[int], routes: tuple[int, int] | None) -> None:
        self._answer = answer
        self._routes = routes
        self._read = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (head_end := self._read.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._read[:head_end]).lower()
            _, _, length = head.partition(b"content-length:")
            end = head_end + 4 + (int(length.split(b"\r\n", 1)[0]) if length else 0)
            if len(self._read) < end:
                return
            body = bytes(self._read[head_end + 4 : end])
            del self._read[:end]
            self._serve(head.split(b" ", 2)[1], body)

    def _serve(self, path: bytes, body: bytes) -> None:
        if path == b"/generate":
            self._generate(body)
        else:
            info = {"model_path": "double", "weight_version": "0"}
            self._write(orjson.dumps({**info, "max_req_input_len": _CONTEXT, "tp_size": 1}))

    def _generate(self, body: bytes) -> None:
        prompt = body.count(b",", 0, body.index(b"]")) + 1
        start = 0
        if self._routes is not None and b'"return_routed_experts":true' in body:
            start = int(body.rpartition(b'"routed_experts_start_len":')[2].split(b",")[0].rstrip(b"}"))
        if b'"stream":true' not in body:
            self._write(orjson.dumps(self._event(prompt, 0, len(self._answer), start)))
            return
        assert self._transport is not None
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        self._transport.write(b"transfer-encoding: chunked\r\n\r\n")
        for first in range(0, len(self._answer), _TOKENS_PER_EVENT):
            event = self._event(prompt, first, min(first + _TOKENS_PER_EVENT, len(self._answer)), start)
            self._chunk(b"data: " + orjson.dumps(event) + b"\n\n")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, prompt: int, first: int, end: int, start: int) -> dict[str, Any]:
        ids = self._answer[first:end]
        meta: dict[str, Any] = {
            "finish_reason": None,
            "prompt_tokens": prompt,
            "completion_tokens": end,
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": [[-0.25, token, None] for token in ids],
        }
        if end == len(self._answer):
            meta["finish_reason"] = {"type": "stop", "matched": self._answer[-1]}
            if self._routes is not None:
                rows = prompt + end - 1 - start
                meta["routed_experts"] = base64.b64encode(
                    bytes(4 * rows * self._routes[0] * self._routes[1])
                ).decode()
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _write(self, body: bytes) -> None:
        assert self._transport is not None
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _chunk(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(answer: list[int], routes: tuple[int, int] | None) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Engine(answer, routes), "127.0.0.1", 0)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--answer", required=True, help="token ids of every answer, with commas between")
    parser.add_argument("--routes", help="layers and top-k of the expert routes that it gives, e.g. 48,8")
    options = parser.parse_args()
    layers, top_k = map(int, options.routes.split(",")) if options.routes else (0, 0)
    answer = [int(token) for token in options.answer.split(",")]
    asyncio.run(serve(answer, (layers, top_k) if layers else None))


if __name__ == "__main__":
    main()
