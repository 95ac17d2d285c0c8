"""Allow-lists: what the proxy lets through, and that there is no way around it."""

import asyncio
import ipaddress
import socket

import pytest

from titogym.envs.sandboxes.base import SandboxSpec, Unsupported
from titogym.envs.sandboxes.doors import MOST_CONNECTIONS, Door
from titogym.envs.sandboxes.proxy import Hosts
from titogym.envs.task import AllowList
from titogym.errors import UserError

FETCH = """
import sys, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
TUNNEL = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", 3128, timeout=10)
connection.set_tunnel("localhost", int(sys.argv[1]))
connection.request("GET", "/tunnelled")
print(connection.getresponse().read().decode())
"""


@pytest.fixture
async def server():
    """The port of a server that answers with the first line of the request."""

    async def answer(reader, writer):
        line = (await reader.readline()).strip()
        while (await reader.readline()).strip():
            pass
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(line) + line)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield listening.sockets[0].getsockname()[1]
    listening.close()


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("pypi.org", True),
        ("PyPI.org.", True),
        ("evil-pypi.org", False),
        ("files.pypi.org", False),
        ("pypi.org.evil.example", False),
        ("a.b.example.org", True),
        ("example.org", False),
        ("badexample.org", False),
        ("", False),
    ],
)
def test_names_are_matched_whole(name, allowed):
    assert Hosts(AllowList(("pypi.org", "*.example.org"))).allows_name(name) is allowed


@pytest.mark.parametrize(
    ("address", "listed"), [("10.1.2.3", True), ("11.1.2.3", False), ("::1", True), ("192.0.2.7", True)]
)
def test_addresses_and_ranges(address, listed):
    hosts = Hosts(AllowList(("10.0.0.0/8", "::1", "192.0.2.7")))
    assert hosts.lists_address(ipaddress.ip_address(address)) is listed


@pytest.mark.parametrize("entry", ["", "*", "http://x", "a b", "x:80", "*.*.org", "-"])
def test_what_is_no_host_is_refused(entry):
    with pytest.raises(UserError, match="no host"):
        Hosts(AllowList((entry,)))


@pytest.mark.sandbox
async def test_a_sandbox_reaches_what_is_listed_and_nothing_else(backend, server):
    sandbox = await backend.create(SandboxSpec(network=AllowList(("localhost", "127.0.0.0/8", "::1"))))
    try:
        await sandbox.upload({"fetch.py": FETCH, "tunnel.py": TUNNEL}, "/workspace")

        async def fetch(url, **env):
            done = await sandbox.exec(["python3", "fetch.py", url], env=env, timeout=30)
            return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

        # urllib spares `localhost` its proxy, as no_proxy asks.
        assert await fetch(f"http://localhost:{server}/some/path?q=1", no_proxy="", NO_PROXY="") == (
            "GET /some/path?q=1 HTTP/1.1"
        )
        assert (await sandbox.exec(["python3", "tunnel.py", str(server)])).stdout.strip() == (
            "GET /tunnelled HTTP/1.1"
        )
        assert (await fetch("http://elsewhere.example/")).startswith("403 titogym proxy: the network of")
        assert (await fetch("http://10.0.0.1/")).startswith("403 ")
        assert "rror" in await fetch(f"http://localhost:{server}/"), "there is a way around the proxy"
        heir = await sandbox.successor(read_only={}, env={})
    except BaseException:
        await sandbox.destroy()
        raise
    try:  # the verifier has the same network
        done = await heir.exec(["python3", "/workspace/tunnel.py", str(server)])
        assert done.stdout.strip() == "GET /tunnelled HTTP/1.1"
    finally:
        await heir.destroy()


@pytest.mark.sandbox
async def test_a_listed_name_does_not_lead_into_the_drivers_own_network(backend, server):
    sandbox = await backend.create(SandboxSpec(network=AllowList(("localhost",))))
    try:
        await sandbox.upload({"fetch.py": FETCH}, "/workspace")
        env = {"no_proxy": "", "NO_PROXY": ""}
        done = await sandbox.exec(["python3", "fetch.py", f"http://localhost:{server}/"], env=env)
        assert done.stdout.startswith("403 titogym proxy: localhost is ")
    finally:
        await sandbox.destroy()


@pytest.mark.sandbox
async def test_the_proxys_port_is_no_services(backend):
    with pytest.raises(Unsupported, match="3128"):
        await backend.create(SandboxSpec(network=AllowList(("a.example",)), services={3128: "127.0.0.1:1"}))


async def test_idle_connections_do_not_use_up_the_drivers_descriptors():
    served = 0
    all_served = asyncio.Event()

    async def serve(reader, writer):
        nonlocal served
        served += 1
        if served == MOST_CONNECTIONS + 10:
            all_served.set()
        await reader.read()

    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * MOST_CONNECTIONS)
    door = Door(listener, serve)
    door.open()
    held = [socket.create_connection(listener.getsockname()) for _ in range(MOST_CONNECTIONS + 10)]
    try:
        await asyncio.sleep(0.2)
        assert served == MOST_CONNECTIONS
        for connection in held[:10]:  # those who wait come in when others leave
            connection.close()
        await asyncio.wait_for(all_served.wait(), 10)
    finally:
        door.close()
        for connection in held:
            connection.close()
