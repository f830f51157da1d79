"""The carried network under attack: items 31 to 33, 35 and 36, against servers of ours on this machine's loopback."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
from anyio.abc import SocketAttribute

from proctor.sandbox.net import NetworkPolicy, Rule, Secret
from proctor.sandbox.selftest.checks import Verdict, judge
from proctor.sandbox.selftest.facts import Facts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import SocketStream

    from proctor.sandbox.box import Box
    from proctor.sandbox.selftest.checks import Hall

_NXDOMAIN, _REFUSED = "rcode 3", "rcode 5"


@asynccontextmanager
async def _server() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A web server on loopback: `address:port`, and the requests that reached it."""
    seen: list[bytes] = []

    async def serve(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.EndOfStream, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                pending = b""
                while True:
                    while b"\r\n\r\n" not in pending:
                        pending += await stream.receive()
                    head, _, pending = pending.partition(b"\r\n\r\n")
                    seen.append(head)
                    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nreached")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"127.0.0.1:{listener.extra(SocketAttribute.local_port)}", seen
        tasks.cancel_scope.cancel()


class _Talk:
    """What the probe says to the carried network from inside a sandbox."""

    def __init__(self, box: Box, probe: str) -> None:
        self._box = box
        self._probe = probe

    async def dns(self, name: str, kind: int = 1) -> str:
        """The answer to a query: `rcode N answers N [address]`."""
        return (await self._box.exec([self._probe, "talk", "dns", name, str(kind)], timeout_s=20)).text.strip()

    async def send(self, name: str, data: bytes, port: int = 80) -> str:
        """What comes back for raw bytes to a name that the policy knows."""
        answer = (await self.dns(name)).split()
        if len(answer) < 5:
            return f"no address: {' '.join(answer)}"
        words = [self._probe, "talk", "tcp", answer[4], str(port)]
        return (await self._box.exec(words, stdin=data, timeout_s=20)).text.strip()


@asynccontextmanager
async def _talking(hall: Hall, *rules: Rule, secrets: dict[str, Secret] | None = None) -> AsyncIterator[_Talk]:
    spec = hall.spec(network=NetworkPolicy("allow", rules))
    async with await hall.edge.create(spec, secrets=secrets) as box:
        yield _Talk(box, await hall.place(box))


async def names(hall: Hall) -> Verdict:
    """Only names that the policy lists are answered, and only with kinds of answers that carry nothing out."""
    async with _talking(hall, Rule("listed.test", (80,)), Rule("localhost", (80,))) as talk:
        said = {
            "unlisted": await talk.dns("unlisted.test"),
            "below a listed one": await talk.dns("secret-data.listed.test"),
            "TXT": await talk.dns("listed.test", 16),
            "NULL": await talk.dns("listed.test", 10),
            "long labels": await talk.dns(".".join(["x" * 63] * 3) + ".listed.test"),
            "DoH by name": await talk.dns("dns.google"),
        }
        wrong = {key: answer for key, answer in said.items() if not answer.startswith((_NXDOMAIN, _REFUSED))}
        rebound = await talk.send("localhost", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 80)
        if "200" in rebound:
            wrong["rebinding"] = rebound
    return judge(
        wrong, f"{len(said)} kinds of query refused; a listed name that resolves to loopback: {rebound[:60]!r}"
    )


async def requests(hall: Hall) -> Verdict:
    """Every request of a connection has to be for the name that was dialled; TLS has to name it."""
    get = b"GET / HTTP/1.1\r\nHost: one.test\r\n\r\n"
    attempts = {
        "another Host": b"GET / HTTP/1.1\r\nHost: two.test\r\n\r\n",
        "two Hosts": b"GET / HTTP/1.1\r\nHost: one.test\r\nHost: two.test\r\n\r\n",
        "no Host": b"GET / HTTP/1.1\r\n\r\n",
        "absolute form": b"GET http://two.test/ HTTP/1.1\r\nHost: one.test\r\n\r\n",
        "CONNECT": b"CONNECT 10.0.0.1:22 HTTP/1.1\r\nHost: one.test\r\n\r\n",
        "two lengths": b"POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "a second host on a kept connection": get + b"GET /second HTTP/1.1\r\nHost: two.test\r\n\r\n",
        "bytes that are no protocol": b"\x16\x03\x01\x00\x05hello",
    }
    wrong: dict[str, str] = {}
    async with _server() as (where, seen):
        async with _talking(hall, Rule("one.test", (80,), internal=True, target=where)) as talk:
            if "reached" not in await talk.send("one.test", get):
                wrong["an honest request"] = "was refused"
            for name, data in attempts.items():
                seen.clear()
                await talk.send("one.test", data)
                reached = [head for head in seen if head != get.removesuffix(b"\r\n\r\n")]
                if reached:
                    wrong[name] = f"reached the server: {reached[0][:60]!r}"
        async with _talking(hall, Rule("one.test", (443,), internal=True, target=where)) as talk:
            seen.clear()
            await talk.send("one.test", _client_hello(), 443)
            if seen:
                wrong["TLS without a name"] = "reached the server"
    return judge(wrong, f"{len(attempts)} requests and a TLS hello without a name refused; an honest one arrived")


def _client_hello() -> bytes:
    """A TLS 1.2 hello without extensions: no SNI."""
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    handshake = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(handshake).to_bytes(2, "big") + handshake + b"GET / HTTP/1.1\r\n\r\n"


async def paths(hall: Hall) -> Verdict:
    """A mirror opened for some paths fetches nothing else."""
    wrong: dict[str, str] = {}
    tried = ("/other/", "/simple/../other/", "/simple/%2e%2e/other/", "//other/", "/simple")
    async with _server() as (where, seen):
        rule = Rule("mirror.test", (80,), methods=("GET",), paths=("/simple/",), internal=True, target=where)
        async with _talking(hall, rule) as talk:
            for path in tried[:4]:
                seen.clear()
                await talk.send("mirror.test", f"GET {path} HTTP/1.1\r\nHost: mirror.test\r\n\r\n".encode())
                if seen:
                    wrong[path] = "was fetched"
            seen.clear()
            await talk.send("mirror.test", b"PUT /simple/x HTTP/1.1\r\nHost: mirror.test\r\nContent-Length: 0\r\n\r\n")
            if seen:
                wrong["PUT"] = "arrived"
            answer = await talk.send("mirror.test", b"GET /simple/x HTTP/1.1\r\nHost: mirror.test\r\n\r\n")
            if "reached" not in answer:
                wrong["/simple/x"] = "was refused"
    return judge(wrong, "4 other paths and another method refused, /simple/x fetched")


async def siblings(hall: Hall) -> Verdict:
    """Two sandboxes share no namespace and no id."""
    found: list[Facts] = []
    async with await hall.edge.create(hall.spec()) as one, await hall.edge.create(hall.spec()) as two:
        for box in (one, two):
            probe = await hall.place(box)
            result = await box.exec([probe, "brief"], cwd="/", user="0", timeout_s=20)
            found.append(Facts.parse(result.stdout.data))
        pids = (one.host_pid, two.host_pid)
    if hall.runtime == "runsc":
        return judge(
            [] if pids[0] != pids[1] else ["one process for both"], "a gVisor kernel for each, without devices"
        )
    first, second = (facts.group("ns.") for facts in found)
    wrong = {kind: value for kind, value in first.items() if kind != "time" and second.get(kind) == value}
    maps = [facts.one("uid_map").split()[1] for facts in found]
    if maps[0] == maps[1]:
        wrong["ids"] = f"both begin at {maps[0]}"
    return judge(wrong, f"{len(first) - 1} namespaces differ; ids begin at {maps[0]} and {maps[1]}")


async def secrets(hall: Hall) -> Verdict:
    """A secret is a token inside, and its value goes to its host alone."""
    value = "self-test-value-0123456789"
    wrong: dict[str, str] = {}
    async with _server() as (where, seen):
        rules = [Rule(name, (80,), internal=True, target=where) for name in ("bound.test", "other.test")]
        given = {"KEY": Secret(value, ("bound.test",), plain=True)}
        async with _talking(hall, *rules, secrets=given) as talk:
            token = (await talk._box.exec(["/bin/sh", "-c", "echo $KEY; cat /proc/self/environ"], timeout_s=20)).text
            if value in token:
                wrong["environment"] = "has the value"
            key = token.split()[0].encode()
            for name in ("other.test", "bound.test"):
                request = b"GET / HTTP/1.1\r\nHost: %s\r\nX-Key: %s\r\n\r\n" % (name.encode(), key)
                await talk.send(name, request)
            got = {name: [head for head in seen if name.encode() in head] for name in ("other.test", "bound.test")}
            if any(value.encode() in head or key in head for head in got["other.test"]):
                wrong["other.test"] = "got the value or the token"
            if not any(value.encode() in head for head in got["bound.test"]):
                wrong["bound.test"] = "did not get the value"
    return judge(wrong, "inside only a token; its host got the value, another host neither")
