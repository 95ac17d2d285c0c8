"""SGLang's own routers (`sglang-router`, `smg`) in the place of an engine: one URL before many workers.

They pass `/generate` on, by `ROUTING_KEY` to the same worker for the same session where their policy says so
(`manual`, `consistent_hashing`). What a server says of itself and aborts they do not know: their workers are
asked themselves, and a request ends with its connection.
"""

from typing import Any

from titogym.gateway.engines.base import EngineError

ROUTING_KEY = "x-smg-routing-key"
WORKERS = "/workers"
READY = "/readiness"  # 503 while no worker is healthy


def worker_urls(listed: Any) -> list[str]:
    """The workers in a router's answer to `WORKERS`, each server once. Raises `EngineError` for another's."""
    try:
        # A router that knows of data parallelism lists a server once per rank: `http://host:port@rank`.
        urls = {worker["url"].rpartition("@")[0] or worker["url"] for worker in listed["workers"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError("this server is no SGLang and no router of SGLang's") from error
    if not urls:
        raise EngineError("the router has no workers", 503)
    return sorted(urls)
