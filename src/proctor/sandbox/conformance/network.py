"""Network: nothing but loopback, unless a policy says otherwise."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
from anyio.abc import SocketAttribute

from proctor.sandbox.conformance.checks import Subject, expect, expect_ok
from proctor.sandbox.net import NetworkPolicy, Rule, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import SocketStream

    from proctor.sandbox.box import Box
    from proctor.sandbox.net import NetworkEvent, Visit
    from proctor.sandbox.net.pipes import Pipe


async def nothing_but_loopback(subject: Subject) -> None:
    """Without a network there is one device, loopback, and nothing else can be reached."""
    async with subject.box() as box:
        devices = expect_ok(await box.exec("tail -n +3 /proc/net/dev")).text
        names = [line.split(":")[0].strip() for line in devices.splitlines()]
        expect(names == ["lo"], "loopback is all there is", names)
        for address in ("192.0.2.1/80", "169.254.169.254/80", "10.0.0.1/443"):
            result = await box.exec(["bash", "-c", f"exec 3<>/dev/tcp/{address}"], timeout_s=20)
            expect(result.exit_code not in (0, None), f"{address} cannot be reached", result)
            expect(not result.timed_out, "and that is said at once", result)


async def loopback_works(subject: Subject) -> None:
    """Programs in one sandbox reach each other over loopback, also below port 1024; other sandboxes do not."""
    serve = "import http.server as h; h.HTTPServer(('127.0.0.1', 80), h.SimpleHTTPRequestHandler).serve_forever()"
    ask = "for i in $(seq 100); do exec 3<>/dev/tcp/127.0.0.1/80 && break; sleep 0.1; done 2>/dev/null; \
printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && head -n 1 <&3"
    async with subject.box() as box, subject.box() as other:
        server = await box.start(["python3", "-c", serve])
        result = await box.exec(["bash", "-c", ask], timeout_s=30)
        expect("200 OK" in result.text, "a server answers", result)
        refused = await other.exec(["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/80"])
        expect(refused.exit_code != 0, "the neighbour has a loopback of its own", refused)
        await server.kill()


async def names_have_no_answer(subject: Subject) -> None:
    """Without a network no name is resolved, and that is said at once."""
    async with subject.box() as box:
        result = await box.exec(["getent", "hosts", "example.com"], timeout_s=20)
        expect(result.exit_code not in (0, None) and not result.timed_out, "no such name", result)


def _ask(name: str, port: int = 80) -> list[str]:
    """One line to a name and port, and what comes back, with nothing but a shell."""
    return ["bash", "-c", f"exec 3<>/dev/tcp/{name}/{port} && echo ping >&3 && head -n 1 <&3"]


async def _answer(pipe: Pipe, visit: Visit) -> None:
    line = await pipe.receive()
    await pipe.send(f"{visit.name} heard {line.decode().strip()}\n".encode())


@asynccontextmanager
async def _server() -> AsyncIterator[str]:
    """Somebody on the machine's loopback who answers like `_answer`; gives `address:port`."""

    async def serve(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.EndOfStream, OSError, anyio.BrokenResourceError):
                await stream.send(b"one.test heard " + await stream.receive())

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(SocketAttribute.local_port)
        yield f"127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


async def policies(subject: Subject) -> None:
    """What a policy names is carried, all else is refused and on record, and a new policy holds at once."""
    subject.needs("allow" in subject.can.networks, "network policies")
    events: list[NetworkEvent] = []
    services = {"service.test": Service.stream(_answer)}
    async with _server() as where:
        rule = Rule("one.test", ports=(80,), protocol="tcp", internal=True, target=where)
        spec = subject.spec(network=NetworkPolicy("allow", (rule,)))
        async with await subject.edge.create(spec, services=services, on_network=events.append) as box:
            for name in ("one.test", "service.test"):
                result = await box.exec(_ask(name), timeout_s=30)
                expect(result.text == f"{name} heard ping\n", f"{name} answers", result)
            for name, port in (("two.test", 80), ("one.test", 81), ("192.0.2.1", 80)):
                await _expect_refused(box, name, port)
            seen = {(event.kind, event.name) for event in events}
            expect(("connection", "one.test") in seen, "connections are on record", sorted(seen, key=str))
            expect(("lookup", "two.test") in seen, "so are refusals", sorted(seen, key=str))
            await box.set_network(NetworkPolicy())
            await _expect_refused(box, "one.test", 80)
            await box.set_network(NetworkPolicy("allow", (rule,)))
            await box.reset()
            again = await box.exec(_ask("one.test"), timeout_s=30)
            expect(again.text == "one.test heard ping\n", "a policy outlives a reset", again)


async def _expect_refused(box: Box, name: str, port: int) -> None:
    result = await box.exec(_ask(name, port), timeout_s=30)
    expect(not result.ok and not result.timed_out, f"{name}:{port} is refused at once", result)


async def inbound(subject: Subject) -> None:
    """A server inside is reached from outside by whoever holds the sandbox."""
    serve = (
        "import socket as s; l = s.create_server(('127.0.0.1', 8000)); c, _ = l.accept(); c.sendall(c.recv(9)[::-1])"
    )
    async with subject.box() as box:
        server = await box.start(["python3", "-c", serve])
        expect_ok(await box.exec("until grep -q ':1F40 .* 0A ' /proc/net/tcp; do sleep 0.05; done", timeout_s=20))
        with anyio.fail_after(20):
            async with box.connect(8000) as stream:
                await stream.send(b"outside")
                expect(await stream.receive() == b"edistuo", "it answers")
        await server.kill()


CHECKS = (nothing_but_loopback, loopback_works, names_have_no_answer, policies, inbound)
