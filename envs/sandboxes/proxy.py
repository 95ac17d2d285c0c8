"""The proxy of an allow-list: an HTTP forward proxy that connects to the listed hosts and to no other.

It runs in the driver and speaks CONNECT (HTTPS and anything else that programs tunnel) and plain HTTP.
Names are resolved here and the connection goes to the very address that was judged, so that a name
cannot be pointed at the driver's own network between the two.
"""

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from titogym.envs.sandboxes.streams import carry_both_ways
from titogym.envs.task import AllowList
from titogym.errors import UserError

log = logging.getLogger(__name__)

PROXY_PORT = 3128  # on the sandbox's own loopback
_HEAD_BYTES = 1 << 16
_HEAD_SECONDS = 30.0
_CONNECT_SECONDS = 30.0
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_HOP_BY_HOP = (b"proxy-connection", b"proxy-authorization", b"connection", b"keep-alive")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Refused(Exception):
    """This request goes no further; the message is told to the program."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Hosts:
    """An allow-list, read. Raises `UserError` for an entry that is no host."""

    def __init__(self, allowed: AllowList) -> None:
        self._names: set[str] = set()
        self._suffixes: set[str] = set()
        self._ranges: list[Network] = []
        for entry in allowed.hosts:
            text = entry.strip().lower().rstrip(".")
            try:
                self._ranges.append(ipaddress.ip_network(text.strip("[]"), strict=False))
                continue
            except ValueError:
                pass
            if not _NAME.fullmatch(text):
                raise UserError(
                    f"{entry!r} is no host that a network can allow: write a name, *.name, an address or a "
                    "range such as 10.0.0.0/8."
                )
            (self._suffixes if text.startswith("*.") else self._names).add(text.removeprefix("*"))

    def allows_name(self, name: str) -> bool:
        name = name.lower().rstrip(".")
        return name in self._names or any(name.endswith(suffix) for suffix in self._suffixes)

    def lists_address(self, address: Address) -> bool:
        return any(address in network for network in self._ranges)

    async def addresses(self, host: str, port: int) -> list[str]:
        """Where a program may be connected that asks for `host`. Raises `Refused`."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            if not self.lists_address(_plain(address)):
                raise Refused("403 Forbidden", f"the network of this sandbox does not lead to {host}")
            return [host]
        if not self.allows_name(host):
            raise Refused("403 Forbidden", f"the network of this sandbox does not lead to {host}")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Refused("502 Bad Gateway", f"{host} has no address: {error}") from None
        texts = dict.fromkeys(str(entry[4][0]) for entry in found)
        good = [text for text in texts if self._may_be_reached(ipaddress.ip_address(text))]
        if not good:
            raise Refused(
                "403 Forbidden",
                f"{host} is {', '.join(texts)}, which is not public and not listed for this sandbox",
            )
        return good

    def _may_be_reached(self, address: Address) -> bool:
        address = _plain(address)
        return (address.is_global and not address.is_multicast) or self.lists_address(address)


def proxy_for(
    allowed: AllowList,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A function that serves one client connection. Raises `UserError` for a bad list."""
    hosts = Hosts(allowed)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            host, port, leading = _read_head(head)
            far_reader, far_writer = await _connect(host, port, await hosts.addresses(host, port))
        except Refused as refused:
            log.info("refused to a sandbox: %s", refused)
            text = f"titogym proxy: {refused}\n".encode()
            fields = f"Content-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close"
            writer.write(f"HTTP/1.1 {refused.status}\r\n{fields}\r\n\r\n".encode() + text)
            await writer.drain()
            return
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        if leading is None:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            far_writer.write(leading)
        await carry_both_ways(reader, writer, far_reader, far_writer)

    return serve


def _read_head(head: bytes) -> tuple[str, int, bytes | None]:
    """Host, port, and what to send there first; None for a tunnel, which begins with an answer."""
    line, *fields = head[:-4].split(b"\r\n")
    try:
        method, target, version = line.decode("ascii").split(" ")
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise Refused("400 Bad Request", "this is no request to a proxy") from None
    if not host or (method != "CONNECT" and parts.scheme != "http") or parts.username is not None:
        raise Refused("400 Bad Request", "this proxy takes CONNECT host:port and http://host/path")
    if method == "CONNECT":
        return host, port or 443, None
    # One request to a connection: a second one might name another host.
    kept = [field for field in fields if field.partition(b":")[0].strip().lower() not in _HOP_BY_HOP]
    path = parts._replace(scheme="", netloc="").geturl() or "/"
    leading = b"\r\n".join([f"{method} {path} {version}".encode(), *kept, b"Connection: close", b"", b""])
    return host, port or 80, leading


async def _connect(
    host: str, port: int, addresses: list[str]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reason = "no address answers"
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await asyncio.open_connection(address, port, limit=_HEAD_BYTES)
        except (OSError, TimeoutError) as error:
            reason = str(error) or "it does not answer"
    raise Refused("502 Bad Gateway", f"{host}:{port} cannot be reached: {reason}")


def _plain(address: Address) -> Address:
    """An IPv4 address in its IPv6 clothes is what it is."""
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
