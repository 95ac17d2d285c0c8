"""Talking to a gateway from a driver."""

from base64 import b64decode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from titogym.gateway.routes import Routes
from titogym.gateway.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """What an agent needs to use a session.

    `base_url` ends in `/v1`, as OpenAI's SDKs want it; Anthropic's, which add it, want `anthropic_base_url`.
    """

    id: str
    base_url: str
    anthropic_base_url: str
    api_key: str


class GatewayError(Exception):
    """The gateway refused or did not answer. `status` is None when it did not answer."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class GatewayClient:
    """Administration of one gateway, or of several that share the same key. Methods raise `GatewayError`.

    Each gateway owns the sessions that it created: they know nothing of each other. This client creates a
    session on the gateway that it gave the fewest, and finds it there later; a session that another client
    created is looked for on all of them.
    """

    def __init__(self, url: str | Sequence[str], admin_key: str | None = None, timeout: float = 60.0) -> None:
        """Raises `ValueError` when no URL is given."""
        urls = [url] if isinstance(url, str) else url
        if not urls:
            raise ValueError("a gateway client needs a URL")
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.guarded = admin_key is not None  # agents that reach the gateway cannot administrate it
        self._owners: dict[str, str] = {}  # session: URL of its gateway
        self._open = Counter(dict.fromkeys(self.urls, 0))  # sessions that this client has on each
        self._http = httpx.AsyncClient(
            timeout=timeout,
            headers={} if admin_key is None else {b"authorization": f"Bearer {admin_key}".encode()},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def create_session(self, **body: Any) -> SessionHandle:
        """Keys are those of `SessionSpec`: matcher, policy, sampling, limits, labels, routes, ttl_seconds.

        A gateway that does not answer, or is full, gives way to the next.
        """
        *others, last = sorted(self.urls, key=self._open.__getitem__)
        for url in [*others, last]:
            self._open[url] += 1  # at once: sessions are created many at a time
            try:
                session = SessionHandle(**(await self._call(url, "POST", "/sessions", body)))
            except BaseException as error:
                self._open[url] -= 1
                if url == last or not _passing(error):
                    raise
            else:
                self._owners[session.id] = url
                return session
        raise AssertionError  # the last one returns or raises

    async def inspect(self, session_id: str, *, brief: bool = False) -> dict[str, Any]:
        """Everything about a session but its tokens; `brief` leaves out mismatches, which take long."""
        query = {"brief": "1"} if brief else None
        report: dict[str, Any] = await self._of(session_id, "GET", "", query)
        return report

    async def sessions(self) -> list[dict[str, Any]]:
        """Those of every gateway."""
        listed: list[dict[str, Any]] = []
        for url in self.urls:
            found = (await self._call(url, "GET", "/sessions"))["sessions"]
            self._owners.update((session["id"], url) for session in found)
            listed += found
        return listed

    async def turns(self, session_id: str) -> list[dict[str, Any]]:
        """The session's turns as chat messages, in order of commit."""
        turns: list[dict[str, Any]] = (await self._of(session_id, "GET", "/turns"))["turns"]
        return turns

    async def trajectories(self, session_id: str, picker: str | None = None) -> list[Trajectory]:
        """`picker` is the dotted path of a function that chooses leaves, importable by the gateway."""
        query = {} if picker is None else {"picker": picker}
        answer = await self._of(session_id, "GET", "/trajectories", query)
        return [_trajectory(item) for item in answer["trajectories"]]

    async def token_texts(self, session_id: str) -> list[tuple[Trajectory, list[str]]]:
        """Trajectories with the text of each of their tokens."""
        answer = await self._of(session_id, "GET", "/trajectories", {"texts": "1"})
        return [
            (_trajectory(item), texts)
            for item, texts in zip(answer["trajectories"], answer["texts"], strict=True)
        ]

    async def delete(self, session_id: str) -> None:
        await self._of(session_id, "DELETE", "")
        owner = self._owners.pop(session_id, None)
        if owner is not None and self._open[owner] > 0:
            self._open[owner] -= 1

    async def ready(self) -> bool:
        """Whether every gateway answers and has an engine."""
        try:
            for url in self.urls:
                await self._call(url, "GET", "/ready")
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

    async def _of(self, session_id: str, method: str, path: str, query: dict[str, str] | None = None) -> Any:
        """Ask the gateway that owns the session."""
        owner = self._owners.get(session_id)
        *others, last = (owner,) if owner else self.urls
        for url in [*others, last]:
            try:
                answer = await self._call(
                    url, method, f"/sessions/{quote(session_id, safe='')}{path}", query=query
                )
            except GatewayError as error:
                if url == last or error.code != "session_not_found":
                    raise
            else:
                self._owners[session_id] = url
                return answer
        raise AssertionError  # the last one returns or raises

    async def _call(
        self, url: str, method: str, path: str, body: Any = None, query: dict[str, str] | None = None
    ) -> Any:
        try:
            response = await self._http.request(method, url + path, json=body, params=query)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise GatewayError(
                f"The gateway at {url} does not answer: {str(error) or type(error).__name__}."
            ) from error
        if response.is_success:
            return response.json() if response.content else None
        try:
            told = response.json()["error"]
            message, code = str(told["message"]), told["code"]
        except (ValueError, LookupError, TypeError):
            message, code = response.text[:200] or f"{url}{path}: status {response.status_code}", None
        raise GatewayError(message, response.status_code, code)


def _passing(error: BaseException) -> bool:
    """Whether another gateway may do what this one did not."""
    return isinstance(error, GatewayError) and (error.status is None or error.status in (429, 503))


def _trajectory(plain: dict[str, Any]) -> Trajectory:
    plain["version_spans"] = [tuple(span) for span in plain["version_spans"]]
    routes = plain["routes"]
    if routes is not None:
        plain["routes"] = Routes(**{**routes, "data": b64decode(routes["data"])})
    return Trajectory(**plain)
