"""What the model gateway costs: the latency that it adds, its share of one core; beside LiteLLM's proxy and nothing.

    scripts/bench gateway [--rate 200] [--seconds 10] [--rounds 3] [--chunks 20] [--litellm] [--json]

Calls start at a fixed rate, whatever comes back (an open loop), against an upstream that answers at once. Whole answers
and streams of `--chunks` events are measured apart; direct, gateway and proxy take turns within each round, and the
medians of the rounds are printed. CPU is the user and system time of the process in the middle for each call; `core` is
that times the rate, so it also holds on a machine that is too busy to keep up.
The gateway runs as a user runs it: `proctor serve gateway`, every call recorded in a file. `--litellm` installs
LiteLLM's proxy into a virtual environment of its own (some hundred megabytes) and needs the package index.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CHUNKS = int(os.environ.get("BENCH_CHUNKS", "20"))
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "x" * 2000}], "temperature": 0}


def chunk(delta: Mapping[str, Any], **more: Any) -> bytes:
    """One event of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    body = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m-1", "choices": [choice], **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


USAGE = {"prompt_tokens": 500, "completion_tokens": 20, "total_tokens": 520}
STREAM = [chunk({"role": "assistant", "content": "word "}) for _ in range(CHUNKS)]
LAST = [chunk({}, choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]), chunk({}, choices=[], usage=USAGE)]
WHOLE = json.dumps({
    "id": "c-1", "object": "chat.completion", "created": 1, "model": "m-1", "usage": USAGE,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 20}, "finish_reason": "stop"}],
}).encode()  # fmt: skip


async def upstream(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
    """A model that answers at once: `python -m uvicorn gateway:upstream`."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    streamed = scope["method"] == "POST" and json.loads(body).get("stream")
    kind = b"text/event-stream" if streamed else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if not streamed:
        await send({"type": "http.response.body", "body": WHOLE})
        return
    for event in (*STREAM, *LAST):
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@dataclass(frozen=True, slots=True)
class Target:
    """Where calls go, with which key, and whose CPU time counts (None: nobody's)."""

    name: str
    url: str
    key: str
    pid: int | None


def cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that still live."""
    total = 0.0
    for one in [pid, *children(pid)]:
        with suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def children(pid: int) -> list[int]:
    """Processes below a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


async def drive(target: Target, *, rate: float, seconds: float, stream: bool) -> dict[str, float]:
    """Start calls at a fixed rate; latency to the last byte, CPU share, and how many failed."""
    latencies: list[float] = []
    failed = 0
    body = {**REQUEST, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    headers = {"authorization": f"Bearer {target.key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(*, counted: bool = True) -> None:
            nonlocal failed
            began = time.perf_counter()
            async with session.post(f"{target.url}/chat/completions", json=body, headers=headers) as reply:
                content = await reply.read()
                if reply.status != 200 or (stream and b"[DONE]" not in content):
                    failed += 1
            if counted:
                latencies.append(time.perf_counter() - began)

        for _ in range(30):
            await one(counted=False)
        cpu, began = cpu_s(target.pid) if target.pid else 0.0, time.perf_counter()
        async with anyio.create_task_group() as group:
            for number in range(int(rate * seconds)):
                await anyio.sleep(max(0.0, began + number / rate - time.perf_counter()))
                group.start_soon(one)
        wall = time.perf_counter() - began
        used = cpu_s(target.pid) - cpu if target.pid else 0.0
    latencies.sort()
    return {
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[len(latencies) * 99 // 100] * 1e3,
        "cpu_ms": used * 1e3 / len(latencies),
        "core": used / len(latencies) * rate,
        "rate": len(latencies) / wall,
        "failed": float(failed),
    }


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A program while the body runs."""
    with subprocess.Popen(command, text=True, **more) as running:
        try:
            yield running
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()


def wait_for(port: int, seconds: float = 120) -> None:
    """Until somebody listens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
            return
        time.sleep(0.1)
    raise SystemExit(f"nobody listens on port {port} after {seconds:g} s")


@contextmanager
def targets(folder: Path, *, litellm: Path | None, chunks: int) -> Iterator[list[Target]]:
    """The upstream, the gateway before it, and LiteLLM's proxy before it."""
    with ExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", "gateway:upstream", "--port", str(port), "--log-level", "critical"]
        environment = {**os.environ, "BENCH_CHUNKS": str(chunks)}
        stack.enter_context(process([*command, "--http", "httptools"], cwd=Path(__file__).parent, env=environment))
        wait_for(port)
        base = f"http://127.0.0.1:{port}/v1"
        (folder / "key").write_text("bench-key-0123456789")
        (folder / "gateway.toml").write_text(
            f'version = 1\n[upstreams.up]\nbase_url = "{base}"\nprotocols = ["chat"]\napi_key_file = "key"\n'
            '[models.m]\nupstream = "up"\nid = "m-1"\nprices = { prompt = 1.0, completion = 2.0 }\n'
        )
        serve = [sys.executable, "-m", "proctor", "serve", "gateway", str(folder / "gateway.toml"), "--port", "0"]
        gateway = stack.enter_context(
            process([*serve, "--record", str(folder / "calls.jsonl"), "--json"], stdout=subprocess.PIPE)
        )
        assert gateway.stdout is not None
        told = json.loads(gateway.stdout.readline())
        found = [
            Target("direct", base, "none", None),
            Target("gateway", told["base_url"], told["token"], gateway.pid),
        ]
        if litellm is not None:
            port = free_port()
            (folder / "litellm.yaml").write_text(
                "model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m-1\n"
                f"      api_base: {base}\n      api_key: bench-key\ngeneral_settings:\n  master_key: sk-bench\n"
                "litellm_settings:\n  telemetry: false\n"
            )
            command = [str(litellm / "bin" / "litellm"), "--config", str(folder / "litellm.yaml"), "--port", str(port)]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            proxy = stack.enter_context(process([*command, "--host", "127.0.0.1"], **quiet))
            wait_for(port)
            found.append(Target("litellm", f"http://127.0.0.1:{port}/v1", "sk-bench", proxy.pid))
        yield found


def install_litellm(folder: Path) -> Path:
    """A virtual environment with LiteLLM's proxy; made once."""
    if not (folder / "bin" / "litellm").exists():
        print(f"installing LiteLLM's proxy into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", "litellm[proxy]"], check=True)
    return folder


def measure(found: list[Target], *, rate: float, seconds: float, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """For whole and streamed answers, for each target: the medians over the rounds."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind, stream in (("whole", False), ("streamed", True)):
        measured: dict[str, list[dict[str, float]]] = {target.name: [] for target in found}
        for _ in range(rounds):
            for target in found:
                measured[target.name].append(
                    anyio.run(lambda t=target, s=stream: drive(t, rate=rate, seconds=seconds, stream=s))
                )
        results[kind] = {
            name: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            for name, runs in measured.items()
        }
        direct = results[kind]["direct"]["p50_ms"]
        for values in results[kind].values():
            values["added_p50_ms"] = values["p50_ms"] - direct
    return results


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=200.0, help="calls started a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=20, help="events of a streamed answer")
    parser.add_argument("--litellm", action="store_true", help="measure LiteLLM's proxy too")
    parser.add_argument("--litellm-venv", type=Path, help="where it is, or shall be, installed")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    proxy = None
    if arguments.litellm or arguments.litellm_venv:
        default = Path(tempfile.gettempdir()) / f"proctor-bench-litellm-{os.getuid()}"
        proxy = install_litellm(arguments.litellm_venv or default)
    with tempfile.TemporaryDirectory() as name, targets(Path(name), litellm=proxy, chunks=arguments.chunks) as found:
        results = measure(found, rate=arguments.rate, seconds=arguments.seconds, rounds=arguments.rounds)
    if arguments.json:
        print(json.dumps({"load_average": os.getloadavg(), "rate": arguments.rate, **results}, indent=1))
        return
    print(f"{arguments.rate:g} calls/s for {arguments.seconds:g} s, median of {arguments.rounds} rounds; "
          f"load average {os.getloadavg()[0]:.1f}")  # fmt: skip
    print(f"{'':10} {'':9} {'p50 ms':>8} {'added':>8} {'p99 ms':>8} {'cpu ms':>7} {'core':>7} {'failed':>7}")
    for kind, by_name in results.items():
        for name, one in by_name.items():
            core = f"{one['cpu_ms']:7.2f} {one['core']:7.1%}" if name != "direct" else f"{'-':>7} {'-':>7}"
            print(f"{kind:10} {name:9} {one['p50_ms']:8.2f} {one['added_p50_ms']:8.2f} {one['p99_ms']:8.2f} {core} "
                  f"{one['failed']:7.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
