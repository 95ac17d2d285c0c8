"""One conversation as the gateway sees it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.budget import Budget
from titogym.gateway.sessions.flights import Attempts
from titogym.gateway.sessions.matchers import matcher
from titogym.gateway.sessions.policies import Policy, policy
from titogym.gateway.sessions.prompts import RowTexts
from titogym.gateway.sessions.spec import SessionSpec
from titogym.gateway.sessions.tree import Tree


@dataclass(slots=True)
class Diagnostics:
    """What a person should know of how the harness used the session."""

    ignored: dict[str, str] = field(default_factory=dict)  # request field -> why it had no effect
    errors: dict[str, int] = field(default_factory=dict)  # code -> requests that were refused or failed
    last_error: dict[str, Any] | None = None  # code, status, message
    exhausted: str | None = None  # the budget that is used up: "turns" or "tokens"
    aborted: int = 0  # turns whose client went away
    joined: int = 0  # retries of a request in flight
    replayed: int = 0  # retries that were given an answer again
    compared: int = 0  # nodes whose leaves `tito_session_mismatch` has counted

    def failed(self, error: RequestError) -> None:
        self.errors[error.code] = self.errors.get(error.code, 0) + 1
        self.last_error = {"code": error.code, "status": error.status, "message": error.message}
        self.exhausted = error.exhausted or self.exhausted


@dataclass(slots=True, eq=False)
class Session:
    """A token tree with its rules. `touched` is the time of the last use (seconds since the epoch)."""

    id: str
    spec: SessionSpec
    created: float
    touched: float
    tree: Tree
    policy: Policy
    budget: Budget
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    texts: RowTexts = field(default_factory=RowTexts)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: "set[asyncio.Task[Any]]" = field(default_factory=set)  # turns in flight
    attempts: Attempts = field(default_factory=Attempts)
    deleted: bool = False

    @classmethod
    def new(cls, id: str, spec: SessionSpec, created: float, touched: float | None = None) -> "Session":
        tree = Tree(matcher(spec.matcher))
        return cls(
            id=id,
            spec=spec,
            created=created,
            touched=created if touched is None else touched,
            tree=tree,
            policy=policy(spec.policy),
            budget=Budget(spec.limits, tree),
        )

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        return self.tree.size + self.texts.size

    @property
    def idle(self) -> bool:
        return not self.tasks

    def touch(self) -> None:
        self.touched = time.time()
