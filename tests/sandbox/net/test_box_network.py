"""A real sandbox with a carried network: ordinary programs, policies that change, services, ways in."""

from __future__ import annotations

import http.server
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import RefusedError
from proctor.sandbox import Edge, Resources, SandboxSpec
from proctor.sandbox.net import NetworkEvent, NetworkPolicy, Rule, Secret, Service

from ..edges import small

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=2) as made:
        yield made


@contextmanager
def web_server() -> Iterator[str]:
    """A server of the standard library on loopback that says what it was asked; gives `127.0.0.1:port`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = f"{self.path} {self.headers.get('X-Key', '')}".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reaching(where: str, *names: str) -> NetworkPolicy:
    return NetworkPolicy("allow", tuple(Rule(name, (80,), internal=True, target=where) for name in names))


async def test_programs_reach_what_the_policy_names_and_nothing_else(edge: Edge) -> None:
    events: list[NetworkEvent] = []
    with web_server() as where:
        spec = small(network=reaching(where, "one.test"))
        async with await edge.create(spec, on_network=events.append) as box:
            for command in (
                "curl -sS http://one.test/page",
                "wget -qO- http://one.test/page",
                "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://one.test/page\").read().decode())'",
            ):
                result = await box.exec(command, timeout_s=30)
                assert result.text.startswith("/page"), result
            for command in (
                "curl -sS -m 5 http://two.test/",
                f"curl -sS -m 5 http://{where}/",
                "curl -sS -m 5 http://169.254.169.254/",
                "curl -sS -m 5 http://one.test:81/",
                "curl -sS -m 5 --connect-to one.test:80:two.test:80 http://one.test/",
            ):
                assert not (await box.exec(command, timeout_s=30)).ok, command
            # Items 26 and 30: no way out but this one.
            routes = await box.exec("cat /proc/net/route; ls /sys/class/net 2>/dev/null || cat /proc/net/dev")
            assert "eth" not in routes.text
            udp = "import socket; s=socket.socket(2,2); s.settimeout(1); s.sendto(b'x', ('8.8.8.8', 53))"
            assert not (await box.exec(["python3", "-c", udp], timeout_s=30)).ok
            refused = await box.exec("curl -sS -o /dev/null -w '%{http_code}' -H 'Host: two.test' http://one.test/")
            assert refused.text == "403"
            receipt = await box.close()
    assert receipt.network == "allow"
    decisions = receipt.network_decisions
    assert decisions["connections_by_name"]["one.test"] == 4
    assert decisions["reasons"]["request: http-other-host"] == 1
    assert decisions["requests_allowed"] == 3
    assert any(event.kind == "lookup" and event.name == "two.test" and event.reason == "unlisted" for event in events)
    assert all(event.sandbox == receipt.sandbox_id for event in events if event.kind != "dropped")


async def test_a_phase_begins_with_another_policy(edge: Edge) -> None:
    with web_server() as where:
        async with await edge.create(small(network=NetworkPolicy())) as box:
            assert not (await box.exec("curl -sS http://one.test/")).ok
            policy, version = box.network
            assert (policy.mode, version) == ("none", 1)
            assert await box.set_network(reaching(where, "one.test"), version, phase="agent") == 2
            assert (await box.exec("curl -sS http://one.test/")).ok
            with pytest.raises(RefusedError):
                await box.set_network(NetworkPolicy(), expect=1)
            await box.set_network(NetworkPolicy(), expect=2, phase="freeze")
            assert not (await box.exec("curl -sS http://one.test/")).ok
            phases = [event.phase for event in box.network_events if event.kind == "connection"]
            assert phases == ["agent"]
            with pytest.raises(RefusedError, match="was not made to trust"):
                await box.set_network(NetworkPolicy("allow", (Rule("one.test", methods=("GET",)),)))
            assert (await box.receipt()).network == "allow"  # the widest that it ever had


async def test_a_change_of_policy_cuts_a_download_that_runs(edge: Edge) -> None:
    begun = anyio.Event()

    async def endless(pipe: object, _: object) -> None:
        begun.set()
        while True:
            await pipe.send(b"x" * 1000)  # type: ignore[attr-defined]
            await anyio.sleep(0.01)

    from .inside import server

    async def forever(pipe: object) -> None:
        await endless(pipe, None)

    async with server(forever) as where:
        rule = Rule("one.test", (99,), protocol="tcp", internal=True, target=where)
        async with await edge.create(small(network=NetworkPolicy("allow", (rule,)))) as box:
            read = "import socket; s=socket.create_connection(('one.test', 99))\nwhile s.recv(999): pass"
            async with anyio.create_task_group() as tasks:

                async def program() -> None:
                    result = await box.exec(["python3", "-c", read], timeout_s=30)
                    assert not result.timed_out
                    assert "reset" in result.error_text

                tasks.start_soon(program)
                await begun.wait()
                await box.set_network(NetworkPolicy())


async def test_a_network_stays_over_reset_snapshot_and_fork(edge: Edge) -> None:
    with web_server() as where:
        secret = {"API_KEY": Secret("real-value-of-the-key", ("one.test",), plain=True)}
        async with await edge.create(small(network=reaching(where, "one.test")), secrets=secret) as box:
            ask = 'curl -sS -H "X-Key: $API_KEY" http://one.test/x'
            masked = "/x " + "*" * len("real-value-of-the-key")
            token = (await box.exec("echo $API_KEY")).text.strip()
            assert token == box.secret_tokens["API_KEY"]
            assert (await box.exec(ask)).text == masked
            await box.reset()
            assert (await box.exec(ask)).text == masked
            await box.snapshot()
            assert (await box.exec(ask)).text == masked
            (fork,) = await box.fork()
            async with fork:
                assert (await fork.exec(ask)).text == masked
                assert fork.secret_tokens == box.secret_tokens  # type: ignore[attr-defined]
                assert await fork.diff() == []
            everywhere = "grep -rl real-value-of-the-key /proc/self/environ /etc /tmp /root 2>/dev/null"
            assert (await box.exec(everywhere)).text == ""


async def test_tls_ends_at_the_boundary_for_programs_that_know_nothing_of_it(edge: Edge, tmp_path: Path) -> None:
    """Rules inside TLS: the bundle in the sandbox has our authority, upstream is verified by the policy's."""
    from proctor.sandbox.net.authority import Authority

    from .inside import server, web

    upstream = Authority("upstream")
    roomy = Resources(cpus=1, memory_mb=256, disk_mb=64, pids=64)
    programs = (
        "curl -sS https://one.test/simple/x",
        "wget -qO- https://one.test/simple/x",
        "python3 -c 'import urllib.request as u; print(u.urlopen(\"https://one.test/simple/x\").read().decode())'",
        "node -e 'fetch(\"https://one.test/simple/x\").then(r => r.text()).then(console.log)'",
    )
    async with server(web(), upstream.context("one.test")) as where:
        rule = Rule("one.test", (443,), methods=("GET",), paths=("/simple/",), internal=True, target=where)
        spec = SandboxSpec(network=NetworkPolicy("allow", (rule,), upstream.pem), resources=roomy)
        async with await edge.create(spec) as box:
            for command in programs:
                result = await box.exec(command, timeout_s=60)
                assert result.text.strip() == "hello", (command, result)
            refused = await box.exec("curl -sS -o /dev/null -w '%{http_code}' https://one.test/other")
            assert refused.text == "403"
            assert (await box.receipt()).network_decisions["tls_ended_here"]
            assert await box.diff() == []


async def test_a_server_inside_is_reached_from_outside_when_we_ask(edge: Edge) -> None:
    async with await edge.create(small()) as box:
        await box.write("/srv/page", b"from inside")
        serve = ["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1", "-d", "/srv"]
        await box.start(serve, keep=True)
        ready = "until curl -sS -o /dev/null http://127.0.0.1:8000/; do sleep 0.05; done"
        assert (await box.exec(ready, timeout_s=20)).ok
        async with box.connect(8000) as stream:
            await stream.send(b"GET /page HTTP/1.0\r\n\r\n")
            data = b""
            while more := await stream.receive():
                data += more
            assert data.endswith(b"from inside")
        async with box.expose(8000) as (host, port):
            assert host == "127.0.0.1"
            async with await anyio.connect_tcp(host, port) as outside:
                await outside.send(b"GET /page HTTP/1.0\r\n\r\n")
                data = b""
                async for chunk in outside:
                    data += chunk
            assert data.endswith(b"from inside")
        with pytest.raises(OSError, match=r"refused|failed"):
            await anyio.connect_tcp(host, port)


async def test_what_cannot_be_carried_is_refused(edge: Edge) -> None:
    async def app(*_: object) -> None: ...

    with pytest.raises(RefusedError) as caught:
        await edge.create(small(network="open"), services={"a.test": Service.asgi(app)})
    assert caught.value.field == "services"
    async with await edge.create(small()) as box:
        with pytest.raises(RefusedError) as caught:
            await box.set_network(NetworkPolicy())
        assert caught.value.field == "network"
