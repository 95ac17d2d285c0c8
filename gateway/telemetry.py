"""What the gateway tells of its work: Prometheus metrics, and one JSON line per event in its log."""

import logging
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from titogym.gateway.alias import alias
from titogym.gateway.engines.pool import EngineStatus
from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.tree import Node

_LOG = logging.getLogger("titogym.gateway")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

Labels = tuple[tuple[str, str], ...]


class Telemetry:
    """Counts and logs. Sessions are named by their alias, never by their id."""

    def __init__(self) -> None:
        self._totals: Counter[tuple[str, Labels]] = Counter()
        self._histograms = {
            "titogym_turn_seconds": _Histogram(),
            "titogym_first_token_seconds": _Histogram(),
        }
        self._engines: dict[str, str] = {}  # url: state

    def created(self, session: str, labels: Mapping[str, Any]) -> None:
        self._add("titogym_sessions_created_total")
        _log("session_created", session, labels=labels)

    def deleted(self, session: str, expired: bool) -> None:
        self._add("titogym_sessions_deleted_total", why="expired" if expired else "asked")
        _log("session_deleted", session, expired=expired)

    def committed(self, session: str, node: Node) -> None:
        generation, output = node.generation, len(node.generation.output_ids)
        prompt = node.length - output
        self._add("titogym_turns_total", finish=generation.finish)
        self._add("titogym_prompt_tokens_total", prompt)
        self._add("titogym_cached_tokens_total", generation.cached_tokens)
        self._add("titogym_output_tokens_total", output)
        timings = generation.timings
        self._histograms["titogym_turn_seconds"].add(timings.total)
        self._histograms["titogym_first_token_seconds"].add(timings.queued + timings.first_token)
        if _LOG.isEnabledFor(logging.INFO):
            _log(
                "turn",
                session,
                node=node.id,
                prompt_tokens=prompt,
                cached_tokens=generation.cached_tokens,
                output_tokens=output,
                finish=generation.finish,
                engine=generation.engine,
                seconds=round(timings.total, 4),
                first_token_seconds=round(timings.queued + timings.first_token, 4),
            )

    def failed(self, session: str, error: RequestError) -> None:
        self._add("titogym_refusals_total", code=error.code, status=str(error.status))
        level = logging.WARNING if error.status >= 500 else logging.INFO
        _log("refused", session, level, code=error.code, status=error.status, message=error.message)

    def compared(self, types: Iterable[str]) -> None:
        """A leaf's row was compared with a fresh rendering, which found differences of these types."""
        self._add("titogym_leaves_compared_total")
        found = Counter(types)
        for kind, count in found.items():
            self._add("titogym_session_mismatches_total", count, type=kind)
        if found:
            self._add("titogym_leaves_mismatched_total")

    def engines(self, statuses: Iterable[EngineStatus]) -> None:
        """Log engines that changed."""
        for status in statuses:
            if self._engines.get(status.url) != status.state:
                self._engines[status.url] = status.state
                _LOG.warning("engine", extra={"fields": {"url": status.url, "state": status.state}})

    def render(self, gauges: Mapping[str, float], engines: Iterable[EngineStatus]) -> str:
        """Everything in Prometheus' text format."""
        values: dict[tuple[str, Labels], float] = {(name, ()): value for name, value in gauges.items()}
        for status in engines:
            url = (("url", status.url),)
            values["titogym_engine_up", url] = status.state == "up"
            values["titogym_engine_draining", url] = status.state == "draining"
            values["titogym_engine_requests_in_flight", url] = status.in_flight
        lines, known = [], set()
        for (name, labels), value in sorted({**values, **self._totals}.items()):
            if name not in known:
                known.add(name)
                lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines.append(f"{name}{_written(labels)} {float(value):.15g}")
        for name, histogram in self._histograms.items():
            lines += histogram.lines(name)
        return "\n".join([*lines, ""])

    def _add(self, name: str, count: int = 1, **labels: str) -> None:
        self._totals[name, tuple(sorted(labels.items()))] += count


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        lines, total = [f"# TYPE {name} histogram"], 0
        for bound, count in zip((*_SECONDS, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


def _written(labels: Labels) -> str:
    pairs = ",".join(f"{name}={orjson.dumps(value).decode()}" for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def _log(event: str, session: str, level: int = logging.INFO, **fields: Any) -> None:
    if _LOG.isEnabledFor(level):
        _LOG.log(level, event, extra={"fields": {"session": alias(session), **fields}})


class JsonLines(logging.Formatter):
    """One JSON object per record: time (UTC), level, event, and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_to_stderr(level: str) -> None:
    """Write the log of this process as JSON lines, from `level` ("info", "warning", ...) on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    _LOG.setLevel(level.upper())
