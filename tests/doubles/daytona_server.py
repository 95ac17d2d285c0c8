"""A loopback server that speaks what Daytona's SDK speaks; every sandbox is a local one of bubblewrap.

Faults are injected: the next request whose method and path match is refused, delayed, or carried out with
its answer lost.
"""

import asyncio
import base64
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titogym.envs.sandboxes.base import SandboxSpec, Snapshot
from titogym.envs.sandboxes.local import LocalBackend, LocalSandbox
from titogym.envs.task import Limits

_BOUNDARY = "DAYTONA-FILE-BOUNDARY"
_FROM = re.compile(r"^\s*FROM\s+(\S+)", re.MULTILINE)


@dataclass
class Fault:
    """`times` requests with `method` and a path that matches `path` meet it.

    They are answered with `status`; with `lost` only after they were carried out; after `seconds` at least.
    """

    method: str
    path: str
    status: int | None = None
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    lost: bool = False
    seconds: float = 0.0


@dataclass
class Remote:
    """One sandbox: what the API says of it, and the local one behind it."""

    about: dict[str, Any]
    local: LocalSandbox
    polls_until_started: int = 1


class DaytonaDouble:
    """`url` is the API's; `requests` are all it got, as method, path and body; `faults` may be added to."""

    def __init__(self, root: Path) -> None:
        self.remotes: dict[str, Remote] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.times: list[float] = []  # of the requests for a new sandbox
        self.faults: list[Fault] = []
        self.url = ""
        self._root = root
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        config = uvicorn.Config(self._application(), log_level="error", lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join()

    def bodies(self, method: str, path: str) -> list[Any]:
        return [body for made, at, body in self.requests if made == method and re.fullmatch(path, at)]

    def _application(self) -> Starlette:
        sandbox = "/api/sandbox/{id}"
        toolbox = "/toolbox/{id}"
        routes = [
            ("POST", "/api/sandbox", self._create),
            ("GET", "/api/sandbox", self._list),
            ("GET", sandbox, self._get),
            ("DELETE", sandbox, self._delete),
            ("POST", sandbox + "/snapshot", self._keep),
            ("GET", "/api/snapshots/{name}", self._snapshot),
            ("DELETE", "/api/snapshots/{name}", self._delete_snapshot),
            ("POST", toolbox + "/process/execute", self._execute),
            ("POST", toolbox + "/files/bulk-upload", self._upload),
            ("POST", toolbox + "/files/bulk-download", self._download),
        ]
        application = Starlette(
            routes=[
                Route(path, self._with_faults(handler), methods=[method]) for method, path, handler in routes
            ],
            lifespan=self._lifespan,
        )
        return application

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        self._local = LocalBackend(self._root, {"run": "daytona double"})
        yield
        for remote in self.remotes.values():
            await remote.local.destroy()
        for snapshot in self.snapshots.values():
            await self._local.delete_snapshot(snapshot)

    def _with_faults(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            path = request.url.path
            body = await request.body() if "bulk-upload" not in path else b""
            self.requests.append((request.method, path, json.loads(body) if body else None))
            if (request.method, path) == ("POST", "/api/sandbox"):
                self.times.append(time.monotonic())
            fault = next(
                (f for f in self.faults if f.method == request.method and re.search(f.path, path)), None
            )
            if fault is None:
                return await handler(request)
            fault.times -= 1
            if fault.times <= 0:
                self.faults.remove(fault)
            if fault.lost:
                await handler(request)
            await asyncio.sleep(fault.seconds)
            if fault.status is None:
                return await handler(request)
            return _error(fault.status, "injected", fault.headers)

        return handle

    # --- the API

    async def _create(self, request: Request) -> Response:
        body = await request.json()
        name = str(uuid.uuid4())
        dockerfile = (body.get("buildInfo") or {}).get("dockerfileContent", "")
        if dockerfile and not _FROM.search(dockerfile):
            return _error(400, "The Dockerfile has no FROM.")
        kept = self.snapshots.get(body.get("snapshot") or "")
        limits = Limits(memory_mb=512, storage_mb=128, processes=64)
        local = await self._local.create(SandboxSpec(image=kept, limits=limits, workdir="/"))
        about = {
            "id": name,
            "organizationId": "organisation",
            "name": name,
            "user": body.get("user") or "daytona",
            "env": body.get("env") or {},
            "labels": body.get("labels") or {},
            "public": False,
            "networkBlockAll": bool(body.get("networkBlockAll")),
            "kvm": False,
            "target": body.get("target") or "us",
            "cpu": body.get("cpu") or 1,
            "gpu": 0,
            "memory": body.get("memory") or 1,
            "disk": body.get("disk") or 3,
            "state": "build_failed" if "RUN false" in dockerfile else "creating",
            "errorReason": "RUN false" if "RUN false" in dockerfile else None,
            "toolboxProxyUrl": self.url.removesuffix("/api") + "/toolbox",
            "autoStopInterval": body.get("autoStopInterval"),
            "autoDeleteInterval": body.get("autoDeleteInterval"),
        }
        self.remotes[name] = Remote(about, local)
        return JSONResponse(about)

    async def _list(self, request: Request) -> Response:
        wanted = json.loads(request.query_params.get("labels", "{}"))
        found = [r.about for r in self.remotes.values() if wanted.items() <= r.about["labels"].items()]
        after = int(request.query_params.get("cursor", 0))  # pages of two, to be followed
        more = str(after + 2) if len(found) > after + 2 else None
        return JSONResponse({"items": found[after : after + 2], "nextCursor": more})

    async def _get(self, request: Request) -> Response:
        remote = self.remotes.get(request.path_params["id"])
        if remote is None:
            return _missing()
        if remote.about["state"] == "creating":
            remote.polls_until_started -= 1
            if remote.polls_until_started < 0:
                remote.about["state"] = "started"
        return JSONResponse(remote.about)

    async def _delete(self, request: Request) -> Response:
        remote = self.remotes.pop(request.path_params["id"], None)
        if remote is None:
            return _missing()
        await remote.local.destroy()
        return JSONResponse({**remote.about, "state": "destroyed"})

    async def _keep(self, request: Request) -> Response:
        remote = self.remotes[request.path_params["id"]]
        self.snapshots[(await request.json())["name"]] = await remote.local.snapshot()
        return JSONResponse(remote.about)

    async def _snapshot(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.snapshots:
            return _missing()
        moment = "2026-01-01T00:00:00Z"
        return JSONResponse(
            {"id": name, "name": name, "general": False, "state": "active", "size": 1, "entrypoint": None}
            | {"cpu": 1, "gpu": 0, "mem": 1, "disk": 1, "errorReason": None, "sourceSandboxId": None}
            | {"createdAt": moment, "updatedAt": moment, "lastUsedAt": None}
        )

    async def _delete_snapshot(self, request: Request) -> Response:
        await self._local.delete_snapshot(self.snapshots.pop(request.path_params["name"]))
        return Response(status_code=200)

    # --- the toolbox

    async def _execute(self, request: Request) -> Response:
        remote = self.remotes.get(request.path_params["id"])
        if remote is None:
            return _missing()
        body = await request.json()
        # Daytona runs it by the sandbox's own shell, and merges both streams.
        done = await remote.local.exec(
            ["/bin/sh", "-c", f"exec 2>&1; {body['command']}"],
            cwd=body.get("cwd"),
            env={**remote.about["env"], **(body.get("envs") or {})},
            timeout=body.get("timeout") or 10,
            max_output=1 << 24,
        )
        if done.timed_out:
            return _error(408, "command execution timeout")
        return JSONResponse({"exitCode": done.exit_code, "result": done.stdout})

    async def _upload(self, request: Request) -> Response:
        remote = self.remotes.get(request.path_params["id"])
        if remote is None:
            return _missing()
        async with request.form() as form:
            for key, value in form.multi_items():
                if not isinstance(value, str):
                    path = str(form.get(key.removesuffix(".file") + ".path") or value.filename)
                    line = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
                    await remote.local.exec(
                        ["/usr/bin/sh", "-c", line, "sh", path], stdin=await value.read(), cwd="/"
                    )
        return Response(status_code=200)

    async def _download(self, request: Request) -> Response:
        remote = self.remotes.get(request.path_params["id"])
        if remote is None:
            return _missing()
        parts = b""
        for path in (await request.json())["paths"]:
            done = await remote.local.exec(["/usr/bin/base64", path], cwd="/", max_output=1 << 26)
            if done.exit_code == 0:
                content, name, kind = base64.b64decode(done.stdout), "file", "application/octet-stream"
            else:
                gone = {"statusCode": 404, "message": "file not found", "code": "FILE_NOT_FOUND"}
                content = json.dumps({**gone, "source": "DAYTONA_DAEMON"}).encode()
                name, kind = "error", "application/json"
            head = f'Content-Disposition: form-data; name="{name}"; filename="{path}"'
            parts += f"--{_BOUNDARY}\r\nContent-Type: {kind}\r\n{head}\r\n\r\n".encode() + content + b"\r\n"
        parts += f"--{_BOUNDARY}--\r\n".encode()
        return Response(parts, media_type=f"multipart/form-data; boundary={_BOUNDARY}")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    body = {"statusCode": status, "message": message, "code": "INJECTED", "source": "DAYTONA_API"}
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


def _missing() -> Response:
    body = {"statusCode": 404, "message": "not found", "code": "SANDBOX_NOT_FOUND", "source": "DAYTONA_API"}
    return JSONResponse(body, status_code=404)
