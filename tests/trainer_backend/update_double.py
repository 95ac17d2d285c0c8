"""The weight-update side of an SGLang server, without a model: it keeps the tensors that it receives.

They come over a process group, as handles to map, or from a directory.

Run as a program it prints its port. `POST /fault {"path": ..., "kind": "refuse" | "die" | "hang"}` makes it
refuse with status 400, kill itself or never answer at an endpoint; `POST /fault {}` mends it.
`GET /received` tells digests of all tensors, `GET /state` the calls and their effects.
"""

import base64
import hashlib
import json
import os
import pickle
import signal
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from titogym.processes import die_with_parent


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Double:
    def __init__(self):
        self.fault: dict[str, str] = {}
        self.version = "default"
        self.group = None
        self.received = {}
        self.log = []
        self.open = False
        self.paused = False
        self.flushed = False

    def handle(self, path, body):
        self.log.append(path)
        if self.fault.get("path") == path:
            if self.fault["kind"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault["kind"] == "hang":
                time.sleep(3600)
            return 400, {"success": False, "message": "refused on purpose"}
        name = path.strip("/").partition("?")[0]
        return getattr(self, name)(body or {}) or (200, {"success": True, "message": "ok"})

    def server_info(self, body):
        return 200, {"tp_size": 1, "max_req_input_len": 100}

    def model_info(self, body):
        return 200, {"model_path": "m", "weight_version": self.version}

    def init_weights_update_group(self, body):
        rank, size, name = body["rank_offset"], body["world_size"], body["group_name"]
        patience = timedelta(seconds=30)
        store = TCPStore(body["master_address"], body["master_port"], size, False, timeout=patience)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self.group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(body["backend"]),
            PrefixStore(name, store),
            group_name=name,
            timeout=patience,
        )
        _world.pg_group_ranks[self.group] = {i: i for i in range(size)}

    def destroy_weights_update_group(self, body):
        dist.destroy_process_group(self.group)

    def pause_generation(self, body):
        self.paused = body["mode"]

    def continue_generation(self, body):
        self.paused = False

    def begin_weight_update(self, body):
        if self.open:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        self.open = True

    def end_weight_update(self, body):
        self.open = False

    def update_weights_from_distributed(self, body):
        assert self.open
        assert self.paused
        sizes = [
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self.group)
        for name, dtype, part in zip(body["names"], body["dtypes"], flat.split(sizes), strict=True):
            self.received[name] = digest(part.view(getattr(torch, dtype)))
        self.loaded(body)

    def update_weights_from_tensor(self, body):
        assert self.open
        assert self.paused
        (handles,) = body["serialized_named_tensors"]
        for name, tensor in pickle.loads(base64.b64decode(handles)):
            self.received[name] = digest(tensor)
        self.loaded(body)

    def update_weights_from_disk(self, body):
        assert self.paused
        folder = Path(body["model_path"])
        assert (folder / "config.json").exists()
        for name, tensor in load_file(folder / "model.safetensors").items():
            self.received[name] = digest(tensor)
        self.loaded(body)

    def loaded(self, body):
        self.flushed = body["flush_cache"]
        if body["weight_version"] is not None:
            self.version = body["weight_version"]


def main() -> None:
    die_with_parent()
    double = Double()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            if self.path == "/fault":
                double.fault = body or {}
                self.answer(200, {})
            elif self.path == "/received":
                self.answer(200, double.received)
            elif self.path == "/state":
                self.answer(
                    200, {name: getattr(double, name) for name in ("log", "paused", "version", "flushed")}
                )
            else:
                self.answer(*double.handle(self.path, body))

        do_GET = do_POST

        def answer(self, status, content):
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
