"""What the carried network costs: `scripts/bench network [--quick] [--json]`.

One server on this machine's loopback; the same client reaches it directly, through the carried network of a sandbox,
and, where they are installed, through slirp4netns and pasta from a network namespace of its own. Requests over one
connection and over new ones (p50, p99), and bytes of one connection down and up. The rows are measured in turns, so
that whatever else this machine does meets them all; the ratios are of medians, to the direct row.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio

from proctor.sandbox import Edge, Resources, SandboxSpec
from proctor.sandbox.native import seccomp
from proctor.sandbox.native.channel import GuestChannel
from proctor.sandbox.native.launcher import Launcher, LauncherConfig
from proctor.sandbox.native.plan import Bind, Limits, MemoryUpper, Plan
from proctor.sandbox.net import NetworkPolicy, Rule

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from proctor.sandbox.native.carried import CarriedStream

    Measure = Callable[[list[str]], Awaitable[dict[str, Any]]]
    Way = Callable[[int], AbstractAsyncContextManager[Measure]]

MIB = 1 << 20
INSIDE = ("127.9.0.1", 80)
PASTA = ["pasta", "--config-net", "--quiet", "--runas", "0"]
NAME = "bench.test"
OURS = ("direct", "carried", "policy")
GOAL_ADDED_MS, GOAL_MB_PER_S = 1.0, 150.0

CLIENT = r"""
import json, socket, sys, time
host, port, warm, requests, connections, size = sys.argv[1], *map(int, sys.argv[2:])
blob = bytes(1 << 20)

def dial():
    s = socket.create_connection((host, port), 10)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s

def get(s):
    s.sendall(b"GET /small HTTP/1.1\r\nHost: bench.test\r\n\r\n")
    data = b""
    while not data.endswith(b"0123456789abcdef"): data += s.recv(65536)

def timed(count, call):
    times = []
    for _ in range(count):
        began = time.perf_counter(); call(); times.append((time.perf_counter() - began) * 1e3)
    return times

def fresh():
    s = dial(); get(s); s.close()

s = dial()
timed(warm, lambda: get(s))
keep = timed(requests, lambda: get(s))
timed(min(warm, 10), fresh)
new = timed(connections, fresh)
began = time.perf_counter()
s.sendall(b"GET /down/%d HTTP/1.1\r\nHost: bench.test\r\n\r\n" % size)
head, buffer = b"", bytearray(1 << 20)
while b"\r\n\r\n" not in head: head += s.recv(65536)
left = size - len(head.partition(b"\r\n\r\n")[2])
while left:
    got = s.recv_into(buffer)
    assert got
    left -= got
down = size / 1e6 / (time.perf_counter() - began)
began = time.perf_counter()
s.sendall(b"PUT /up HTTP/1.1\r\nHost: bench.test\r\nContent-Length: %d\r\n\r\n" % size)
for _ in range(size >> 20): s.sendall(blob)
assert s.recv(65536).endswith(b"ok")
up = size / 1e6 / (time.perf_counter() - began)
print(json.dumps({"keep_ms": keep, "new_ms": new, "down_mb_per_s": down, "up_mb_per_s": up}))
"""


# --- the server: a process of its own -------------------------------------------------------------------------------


def _serve_one(connection: socket.socket) -> None:
    blob, buffer = bytes(MIB), bytearray(MIB)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, contextlib.suppress(OSError):
        while True:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (more := connection.recv(65_536)):
                    return
                head += more
            head, _, early = head.partition(b"\r\n\r\n")
            path = head.split()[1].split(b"/")
            if path[1] == b"small":
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n0123456789abcdef")
            elif path[1] == b"down":
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n" % path[2])
                for _ in range(int(path[2]) // MIB):
                    connection.sendall(blob)
            else:
                left = int(head.lower().partition(b"content-length:")[2].split()[0]) - len(early)
                while left:
                    left -= connection.recv_into(buffer)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


def serve() -> None:
    """Print the port, then serve until stdin ends."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(server.getsockname()[1], flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve_one, args=(connection,), daemon=True).start()


@contextmanager
def server() -> Iterator[int]:
    """The port of a running server."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


# --- the ways to it ------------------------------------------------------------------------------------------------


async def _run_client(prefix: list[str], arguments: list[str]) -> dict[str, Any]:
    found = await anyio.run_process([*prefix, "/usr/bin/python3", "-c", CLIENT, *arguments])
    result: dict[str, Any] = json.loads(found.stdout)
    return result


@asynccontextmanager
async def direct(port: int) -> AsyncIterator[Measure]:
    """This machine's own loopback."""
    yield lambda numbers: _run_client([], ["127.0.0.1", str(port), *numbers])


async def _splice(stream: CarriedStream, port: int) -> None:
    """What a boundary without any policy does: dial, and copy both ways."""
    loop, sock = asyncio.get_running_loop(), socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, contextlib.suppress(OSError):
        await loop.sock_connect(sock, ("127.0.0.1", port))

        async def outward() -> None:
            while data := await stream.receive(256 << 10):
                await loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outward)
            while data := await loop.sock_recv(sock, 256 << 10):
                await stream.send(data)
            await stream.send_eof()
    await stream.aclose()


def _layer(root: Path) -> Path:
    for name in ("usr", "proc", "dev", "sys", "tmp", "etc"):
        (root / name).mkdir()
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    return root


async def _no_names(query: bytes, over: Literal["udp", "tcp"]) -> None:
    del query, over


@asynccontextmanager
async def carried(port: int) -> AsyncIterator[Measure]:
    """A sandbox whose network is carried by the guest, to a splice in this process: the transport alone."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            name="bench",
            layers=(_layer(Path(folder)),),
            upper=MemoryUpper(64 << 20, 10_000),
            limits=Limits(512 << 20, 128),
            seccomp=seccomp.program(),
            binds=(Bind(Path("/usr"), "/usr"),),
            network="carried",
        )
        launcher = await Launcher.start(LauncherConfig(edge=f"bench-{os.getpid()}", pool=1))
        try:
            launched = await launcher.launch(plan)
            channel = GuestChannel(launched.channel)
            async with anyio.create_task_group() as tasks:
                await tasks.start(channel.run)
                channel.carry(lambda stream: tasks.start_soon(_splice, stream, port), _no_names)
                await channel.listen(*INSIDE)

                async def measure(numbers: list[str]) -> dict[str, Any]:
                    argv = ["/usr/bin/python3", "-c", CLIENT, INSIDE[0], str(INSIDE[1]), *numbers]
                    found = await channel.exec(argv, env={"PATH": "/usr/bin:/bin"})
                    if found.exit_code:
                        raise RuntimeError(found.error_text)
                    result: dict[str, Any] = json.loads(found.text)
                    return result

                yield measure
                channel.close()
                tasks.cancel_scope.cancel()
            launched.close()
            await launcher.layout.slot(launcher.config.edge, launched.slot).destroy()
        finally:
            await launcher.close()


@asynccontextmanager
async def _running(command: list[str]) -> AsyncIterator[int]:
    """The pid of a program that has said on stdout that it is ready."""
    process = await anyio.open_process(command, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        await process.stdout.receive(1)
        yield process.pid
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


@asynccontextmanager
async def slirp4netns(port: int) -> AsyncIterator[Measure]:
    """A network namespace behind slirp4netns (MTU 65,520); 10.0.2.2 is this machine's loopback."""
    hold = ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"]
    async with _running(hold) as holder:
        slirp = ["slirp4netns", "--configure", "--mtu=65520", "--ready-fd=1", str(holder), "tap0"]
        async with _running(slirp):
            enter = ["nsenter", f"--net=/proc/{holder}/ns/net"]
            yield lambda numbers: _run_client(enter, ["10.0.2.2", str(port), *numbers])


@asynccontextmanager
async def pasta(port: int) -> AsyncIterator[Measure]:
    """A network namespace made by pasta, through its tap device; the gateway's address is this machine's loopback."""
    routes = await anyio.run_process(["ip", "-j", "route", "show", "default"])
    address = json.loads(routes.stdout)[0]["gateway"]
    enter = [*PASTA, "-T", "none", "-t", "none", "--"]
    yield lambda numbers: _run_client(enter, [address, str(port), *numbers])


@asynccontextmanager
async def pasta_spliced(port: int) -> AsyncIterator[Measure]:
    """A network namespace made by pasta with one port forwarded by splice(2), past its tap device."""
    enter = [*PASTA, "-T", str(port), "-t", "none", "--"]
    yield lambda numbers: _run_client(enter, ["127.0.0.1", str(port), *numbers])


def policed(protocol: Literal["web", "tcp"]) -> Way:
    """A sandbox as users have it: a policy on an Edge, its connections carried unread (tcp) or as HTTP (web)."""

    @asynccontextmanager
    async def way(port: int) -> AsyncIterator[Measure]:
        rule = Rule(NAME, (80,), protocol=protocol, internal=True, target=f"127.0.0.1:{port}")
        spec = SandboxSpec(network=NetworkPolicy("allow", (rule,)), resources=Resources(memory_mb=512))
        async with Edge(pool_size=1) as edge, await edge.create(spec) as box:

            async def measure(numbers: list[str]) -> dict[str, Any]:
                found = await box.exec(["/usr/bin/python3", "-c", CLIENT, NAME, "80", *numbers])
                if found.exit_code:
                    raise RuntimeError(found.error_text)
                result: dict[str, Any] = json.loads(found.text)
                return result

            yield measure

    return way


WAYS: dict[str, Way] = {
    "direct": direct,
    "carried": carried,
    "policy tcp": policed("tcp"),
    "policy http": policed("web"),
    "slirp4netns": slirp4netns,
    "pasta": pasta,
    "pasta -T": pasta_spliced,
}


def _missing(way: str) -> str | None:
    program = way.split()[0]
    return None if program in OURS or shutil.which(program) else f"{program} is not installed"


# --- measuring -----------------------------------------------------------------------------------------------------


def _summary(samples: list[dict[str, Any]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for kind in ("keep", "new"):
        times = sorted(one for sample in samples for one in sample[f"{kind}_ms"])
        row[f"{kind}_p50_ms"] = round(times[len(times) // 2], 3)
        row[f"{kind}_p99_ms"] = round(times[min(len(times) - 1, len(times) * 99 // 100)], 3)
    for kind in ("down", "up"):
        row[f"{kind}_mb_per_s"] = round(statistics.median(sample[f"{kind}_mb_per_s"] for sample in samples), 1)
    return row


def _goals(row: dict[str, float], base: dict[str, float]) -> dict[str, tuple[float, bool]]:
    """What was reached of each goal, and whether that is enough."""
    goals = {}
    for kind in ("keep", "new"):
        added = round(row[f"{kind}_p50_ms"] - base[f"{kind}_p50_ms"], 3)
        goals[f"{kind}: added p50 <= {GOAL_ADDED_MS:g} ms"] = (added, added <= GOAL_ADDED_MS)
    for kind in ("down", "up"):
        rate = row[f"{kind}_mb_per_s"]
        goals[f"{kind} >= {GOAL_MB_PER_S:g} MB/s"] = (rate, rate >= GOAL_MB_PER_S)
    return goals


async def run(rounds: int, numbers: list[str]) -> dict[str, Any]:
    """All rows; what does not work is skipped with its reason."""
    samples: dict[str, list[dict[str, Any]]] = {}
    skipped = {way: reason for way in WAYS if (reason := _missing(way))}
    with server() as port:
        async with contextlib.AsyncExitStack() as stack:
            measures: dict[str, Measure] = {}
            for way, enter in WAYS.items():
                if way not in skipped:
                    measures[way] = await stack.enter_async_context(enter(port))
            for _ in range(rounds):
                for way, measure in measures.items():
                    if way in skipped:
                        continue
                    try:
                        samples.setdefault(way, []).append(await measure(numbers))
                    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                        if way.split()[0] in OURS:
                            raise
                        status = getattr(error, "returncode", error)
                        skipped[way] = f"the client fails through it ({status})"
    rows = {way: _summary(taken) for way, taken in samples.items() if way not in skipped}
    base = rows["direct"]
    ratios = {way: {name: round(row[name] / base[name], 2) for name in row} for way, row in rows.items()}
    return {
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()},
        "rows": rows,
        "to_direct": ratios,
        "skipped": skipped,
        "goals": {way: _goals(rows[way], base) for way in rows if way.split()[0] in OURS[1:]},
    }


def _print(result: dict[str, Any]) -> None:
    columns = list(next(iter(result["rows"].values())))
    print(f"{'':14}" + "".join(f"{column:>16}" for column in columns))
    for way, row in result["rows"].items():
        print(f"{way:14}" + "".join(f"{row[column]:>16}" for column in columns))
    for way, reason in result["skipped"].items():
        print(f"{way:14}skipped: {reason}")
    for way, goals in result["goals"].items():
        for goal, (value, met) in goals.items():
            print(f"{way:14}{'met' if met else 'MISSED':8}{goal}: {value}")
    print(f"load {result['machine']['load'][0]:.1f} on {result['machine']['cpus']} cores")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    numbers = [5, 50, 20, 16 * MIB] if options.quick else [50, 500, 200, 256 * MIB]
    result = anyio.run(run, 1 if options.quick else 3, [str(number) for number in numbers])
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)


if __name__ == "__main__":
    main()
