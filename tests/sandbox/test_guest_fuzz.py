"""The guest, built with the address and undefined-behaviour sanitizers, against a host that lies.

It runs as nobody: a mutated request may ask for anything.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox.native.frames import GUEST_ID, U32, ExecFlag, FrameType, exec_request, frame, terminal_size
from proctor.sandbox.native.launcher import BINARY
from proctor.sandbox.native.records import Record, encode, end_record

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

SECONDS = float(os.environ.get("PROCTOR_FUZZ_SECONDS", "5"))
SOURCE = BINARY.parent.parent / "csrc"
_GUEST = ("attach", "carry", "exec", "files", "frame", "group", "guest", "main")
_GUEST += ("net", "standalone", "streams", "tell", "terminal", "tree", "user")
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guest half of proctor-init with sanitizers."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    folder.chmod(0o755)
    for parent in list(folder.parents)[:2]:
        parent.chmod(0o755)
    binary = folder / "proctor-init"

    def build(target: str, code: bytes, *sources: str) -> int:
        command = [compiler, "-std=c11", "-O1", "-g", "-D_GNU_SOURCE", "-fno-strict-aliasing", *_SANITIZE, "-o", target]
        return subprocess.run([*command, *sources, "-x", "c", "-"], input=code, check=False).returncode

    if build(f"{folder}/probe", b"int main(void) { return 0; }"):
        pytest.skip("this compiler has no sanitizers")
    launcher = b"int launcher_main(int fd); int launcher_main(int fd) { return fd; }"
    assert build(str(binary), launcher, *(f"{SOURCE}/{name}.c" for name in _GUEST)) == 0
    return binary


@pytest.fixture
def reports() -> Iterator[Path]:
    """Where sanitizers report, also those of file operations, whose stderr belongs to the host."""
    folder = Path(tempfile.mkdtemp(prefix="proctor-fuzz-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


# Small buffers, so that a few frames fill them.
_OWN_NETWORK = (
    "for name in rmem wmem; do echo 4608 4608 4608 > /proc/sys/net/ipv4/tcp_$name; done; ip link set lo up && "
)


def run_guest(
    binary: Path,
    reports: Path,
    script: list[bytes],
    rng: random.Random,
    *,
    patient: bool,
    reading: bool = False,
    hosts: int = 1,
) -> int:
    """Give one guest a script of frames, hang up, and return its exit status. With more `hosts` it is durable, and gets
    the script again from each of them."""
    ours, theirs = socket.socketpair()
    bell, attach = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    enter = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", "--net"]
    enter += ["sh", "-c", _OWN_NETWORK + 'exec "$@"', "sh"]
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    options = f"detect_leaks=0:exitcode=99:log_path={reports}/report"
    process = subprocess.Popen(
        [*enter, *drop, str(binary), "guest-dev", str(theirs.fileno()), *(["-", str(attach.fileno())] * (hosts > 1))],
        pass_fds=[theirs.fileno(), attach.fileno()],
        cwd="/",
        env={"ASAN_OPTIONS": options, "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode=99:log_path={reports}/report"},
    )
    theirs.close()
    attach.close()
    for number in range(hosts):
        if number:
            ours, theirs = socket.socketpair()
            with contextlib.suppress(BrokenPipeError):
                socket.send_fds(bell, [b"c"], [theirs.fileno()])
            theirs.close()
        say(ours, script, rng, patient=patient, reading=reading)
    bell.close()
    return process.wait(30)


def say(ours: socket.socket, script: list[bytes], rng: random.Random, *, patient: bool, reading: bool) -> None:
    """Say it all, cut where no frame ends, and hang up."""
    ours.settimeout(5)
    if reading:
        threading.Thread(target=_drain, args=(ours.dup(),), daemon=True).start()
    try:
        for data in script:
            at = 0
            while at < len(data):  # cut where a frame does not end
                size = rng.choice([1, 5, 12, 100, 70_000])
                ours.sendall(data[at : at + size])
                at += size
            if rng.random() < 0.2 and not reading:
                ours.recv(1 << 20)
        if patient:  # the file operations have their input: let them come to their end
            ours.sendall(frame(FrameType.PING, 0, 0, bytes(8)))
            time.sleep(0.05)
    except (BrokenPipeError, ConnectionResetError, TimeoutError):
        pass
    finally:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)  # a copy of it may be being read
        ours.close()


def _drain(sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        while sock.recv(1 << 20):
            pass


def honest(rng: random.Random, exec_id: int) -> list[bytes]:
    """Frames of one command as a host would send them."""
    flags = ExecFlag(rng.randrange(32)) | ExecFlag.STDIN
    builtin = rng.choice([None, None, "read", "write", "list", "stat", "remove", "mkdir", "pack", "unpack", "nonsense"])
    argv = rng.choice(
        [["/bin/cat"], ["/bin/true"], ["/bin/sh", "-c", "sleep 9 & echo x"], ["/proc/self/status", "99"], ["/etc"]]
    )
    request = exec_request(
        argv,
        env={"A": "b", "PATH": rng.choice(["/bin", "", ":" * 5000])},
        cwd=rng.choice([None, "/", "/nowhere"]),
        user=rng.choice([None, "root", "nobody", "0:0", "1234", "a:b", ":", "root:nogroup"]),
        flags=flags,
        report_fd=rng.choice([None, 3, 9, 255]),
        builtin=builtin,
        terminal=rng.choice([None, None, (80, 24)]),
    )
    frames = [frame(FrameType.EXEC, exec_id, 0, request)]
    if rng.random() < 0.2:
        half = len(request) // 2
        frames = [frame(FrameType.EXEC, exec_id, 1, request[:half]), frame(FrameType.EXEC, exec_id, 0, request[half:])]
    for _ in range(rng.randrange(4)):
        frames.append(frame(FrameType.DATA, exec_id, 0, rng.randbytes(rng.choice([1, 40, 65_536]))))
    return [
        *frames,
        *rng.sample(
            [
                frame(FrameType.EOF, exec_id, 0),
                frame(FrameType.KILL, exec_id, 0, U32.pack(rng.choice([0, 0, 9, 15, 64]))),
                frame(FrameType.PING, 0, 0, bytes(8)),
                frame(FrameType.CREDIT, exec_id, 1, U32.pack(rng.choice([0, 1, 262_144]))),
                frame(FrameType.RESIZE, exec_id, 0, terminal_size(rng.choice([1, 65_535]), 24)),
                frame(FrameType.KILLALL),
                frame(FrameType.DONE, exec_id),
            ],
            rng.randrange(4),
        ),
    ]


def carrying(rng: random.Random, count: int) -> list[bytes]:
    """Frames of a carried network: listeners, and dials of the guest's own listeners, so that both ends of a connection
    are its own. The numbers that it gives can be guessed: slots in order, their first generation."""
    ports = [9000 + rng.randrange(3) for _ in range(count)]
    ask = exec_request(["/bin/bash", "-c", "printf %0100d 0 > /dev/udp/127.0.0.1/9053"], user="nobody")
    script = [frame(FrameType.LISTEN, 1, 1, _address(9053)), frame(FrameType.LISTEN, 2, 0, _address(9000))]
    for number, port in enumerate(ports, start=3):
        connection = GUEST_ID | 1 << 9 | rng.randrange(max(1, len(ports)))
        size = rng.choice([1, 1000, 65_536])
        script += rng.choices(
            [
                [frame(FrameType.LISTEN, number, 0, _address(port))],
                [
                    frame(
                        FrameType.CONNECT,
                        number,
                        0,
                        rng.choice([_address(port), bytes(15) + b"\1" + _address(port)[4:]]),
                    )
                ],
                [frame(FrameType.DATA, connection, 0, rng.randbytes(size))] * rng.randrange(1, 5),
                [frame(FrameType.EOF, connection, rng.randrange(2))],
                [frame(FrameType.RESET, connection)],
                [frame(FrameType.RESET, number - 1)],
                [frame(FrameType.UNLISTEN, rng.randrange(1, number))],
                [frame(FrameType.CREDIT, connection, 0, U32.pack(rng.choice([1, 65_536])))],
                [frame(FrameType.EXEC, number, 0, ask)],
                [frame(FrameType.QUERY, GUEST_ID | 1 << 7 | rng.randrange(2), 0, rng.randbytes(40))],
            ],
            weights=[3, 6, 16, 3, 2, 1, 1, 1, 1, 0.1],
        )[0]
    return script


def _address(port: int, host: bytes = bytes([127, 0, 0, 1])) -> bytes:
    return host + port.to_bytes(2, "little")


def unpacking(rng: random.Random, exec_id: int, folder: Path) -> list[bytes]:
    """A tree stream into a folder, sound or not, as the input of `unpack`."""
    names = [b"a", b"b", b"c" * 255, b"d" * 256, b"e" * 5000, b"..", b".", b"", b"\xff\n", b"a\0"]
    stream = b""
    count = rng.randrange(1, 30)
    for _ in range(count):
        path = b"/".join(rng.choices(names, weights=[30, 30, 3, 1, 1, 1, 1, 1, 5, 1], k=rng.choice([1, 1, 2, 3, 40])))
        kind, content = rng.choice("DDFFLHdX"), rng.randbytes(rng.choice([0, 1, 5000]))
        target = rng.choice([b"a", b"b/a", b"../..", b"/etc", b""]) if kind in "LH" else b""
        size = len(content) if kind == "F" else 0
        stream += encode(
            Record(kind, path[:65_535], rng.randrange(0o10000), mtime_ns=rng.randrange(2**62), size=size, target=target)
        )
        stream += content + bytes(4) if kind == "F" else b""
    stream += end_record(count)
    if rng.random() < 0.5:
        damaged = bytearray(stream)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        stream = bytes(damaged)
    request = exec_request([f"{folder}/t{exec_id}"], builtin="unpack", user="nobody", flags=ExecFlag.STDIN)
    pieces = [stream[at : at + 65_536] for at in range(0, min(len(stream), 262_144), 65_536)]
    data = [frame(FrameType.DATA, exec_id, 0, piece) for piece in pieces]
    return [frame(FrameType.EXEC, exec_id, 0, request), *data, frame(FrameType.EOF, exec_id, 0)]


def mutated(rng: random.Random, script: list[bytes]) -> list[bytes]:
    """The script with something wrong in it."""
    script = list(script)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(script))
        data = bytearray(script[at]) or bytearray(1)
        choice = rng.randrange(5)
        if choice == 0:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif choice == 1:
            data = data[: rng.randrange(len(data))]
        elif choice == 2:
            data = bytearray(rng.randbytes(rng.randrange(1, 200)))
        elif choice == 3:
            data = data + data
        else:
            position = rng.randrange(12, len(data) + 1) if len(data) > 12 else 0
            data[position:position] = rng.randbytes(rng.randrange(1, 9))
            data[:4] = U32.pack(max(0, len(data) - 12))
        script[at] = bytes(data)
    return script


def rehearse(seed: int, wrong: str, folder: Path) -> tuple[list[bytes], random.Random]:
    """The script of one run, the same for the same seed."""
    rng = random.Random(seed)
    ids = range(1, rng.randint(2, 12))
    if wrong == "trees":
        return [data for exec_id in ids for data in unpacking(rng, exec_id, folder)], rng
    if wrong.startswith("network"):
        script = carrying(rng, rng.randint(5, 60))
    else:
        script = [data for exec_id in ids for data in honest(rng, exec_id)]
    return (mutated(rng, script) if "frames" in wrong else script), rng


@pytest.mark.parametrize("wrong", ["nothing", "frames", "trees", "network", "network frames", "hosts"])
def test_no_script_makes_the_guest_misbehave(sanitized: Path, reports: Path, wrong: str) -> None:
    first, deadline, runs = 20_261_130, time.monotonic() + SECONDS, 0
    while time.monotonic() < deadline or runs < 10:
        script, rng = rehearse(first + runs, wrong, reports / "trees")
        patient, reading = wrong in ("trees", "network"), "network" in wrong
        hosts = rng.choice([2, 4]) if wrong == "hosts" else 1
        reading = reading or (hosts > 1 and rng.random() < 0.5)
        status = run_guest(sanitized, reports, script, rng, patient=patient, reading=reading, hosts=hosts)
        found = [path.read_text(errors="replace")[:4000] for path in sorted(reports.glob("report*"))]
        assert (status, found) == (0, []), f"seed {first + runs}"
        runs += 1
