"""Talking to a gateway from a driver."""

from base64 import b64decode
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from titogym.gateway.routes import Routes
from titogym.gateway.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """What an agent needs to use a session. `base_url` ends in `/v1`."""

    id: str
    base_url: str
    api_key: str


class GatewayError(Exception):
    """The gateway refused or did not answer. `status` is None when it did not answer."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class GatewayClient:
    """Administration of one gateway. Methods raise `GatewayError`."""

    def __init__(self, url: str, admin_key: str | None = None, timeout: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.guarded = admin_key is not None  # agents that reach the gateway cannot administrate it
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=timeout,
            headers={} if admin_key is None else {"authorization": f"Bearer {admin_key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def create_session(self, **body: Any) -> SessionHandle:
        """Keys are those of `SessionSpec`: matcher, policy, sampling, limits, labels, ttl_seconds."""
        return SessionHandle(**(await self._call("POST", "/sessions", body)))

    async def inspect(self, session_id: str) -> dict[str, Any]:
        report: dict[str, Any] = await self._call("GET", f"/sessions/{session_id}")
        return report

    async def sessions(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = (await self._call("GET", "/sessions"))["sessions"]
        return listed

    async def turns(self, session_id: str) -> list[dict[str, Any]]:
        """The session's turns as chat messages, in order of commit."""
        turns: list[dict[str, Any]] = (await self._call("GET", f"/sessions/{session_id}/turns"))["turns"]
        return turns

    async def trajectories(self, session_id: str, picker: str | None = None) -> list[Trajectory]:
        """`picker` is the dotted path of a function that chooses leaves, importable by the gateway."""
        query = {} if picker is None else {"picker": picker}
        answer = await self._call("GET", f"/sessions/{session_id}/trajectories", query=query)
        return [_trajectory(item) for item in answer["trajectories"]]

    async def token_texts(self, session_id: str) -> list[tuple[Trajectory, list[str]]]:
        """Trajectories with the text of each of their tokens."""
        answer = await self._call("GET", f"/sessions/{session_id}/trajectories", query={"texts": "1"})
        return [
            (_trajectory(item), texts)
            for item, texts in zip(answer["trajectories"], answer["texts"], strict=True)
        ]

    async def delete(self, session_id: str) -> None:
        await self._call("DELETE", f"/sessions/{session_id}")

    async def ready(self) -> bool:
        """Whether the gateway answers and has an engine."""
        try:
            await self._call("GET", "/ready")
        except GatewayError:
            return False
        return True

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(
        self, method: str, path: str, body: Any = None, query: dict[str, str] | None = None
    ) -> Any:
        try:
            response = await self._http.request(method, path, json=body, params=query)
        except httpx.HTTPError as error:
            raise GatewayError(f"The gateway at {self.url} does not answer: {error!r}.") from error
        if response.is_success:
            return response.json() if response.content else None
        try:
            told = response.json()["error"]
            message, code = str(told["message"]), told["code"]
        except (ValueError, LookupError, TypeError):
            message, code = response.text[:200], None
        raise GatewayError(message, response.status_code, code)


def _trajectory(plain: dict[str, Any]) -> Trajectory:
    plain["version_spans"] = [tuple(span) for span in plain["version_spans"]]
    routes = plain["routes"]
    if routes is not None:
        plain["routes"] = Routes(**{**routes, "data": b64decode(routes["data"])})
    return Trajectory(**plain)
