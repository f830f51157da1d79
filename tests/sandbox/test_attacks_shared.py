"""What all sandboxes of a machine share: no one of them may use it up, or reach the machine through it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox.native import seccomp
from proctor.sandbox.native.plan import Limits

from .test_seccomp import ALLOW, ARCHITECTURES, call

if TYPE_CHECKING:
    from proctor.sandbox.native.syscall_numbers import Arch

    from .conftest import MakeRoom

MB = 1 << 20

_TERMINALS = """
import os
held = []
try:
    while len(held) < 300: held.append(os.open("/dev/ptmx", os.O_RDWR))
except OSError as error: print(error.errno, len(held))
else: print("no limit")
"""

_QUEUE_IN_SOCKETS = """
import socket
held, queued = [], 0
for _ in range(20):
    into = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    into.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    into.bind(("127.0.0.1", 0))
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    out.connect(into.getsockname())
    out.setblocking(False)
    for _ in range(100):
        try: out.send(bytes(60000))
        except OSError: break
    into.setblocking(False)
    held += [into, out]
for _ in range(20):
    listener = socket.create_server(("127.0.0.1", 0))
    out = socket.socket()
    out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    out.connect(listener.getsockname())
    out.setblocking(False)
    try:
        while True: queued += out.send(bytes(65536))
    except OSError: pass
    held += [listener, out, listener.accept()[0]]
for into in held[:40:2]:
    try:
        while True: queued += len(into.recv(65536))
    except OSError: pass
print(queued >> 20)
"""

_CORE = """
import os, resource, signal
print(resource.getrlimit(resource.RLIMIT_CORE))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(resource.getrlimit(resource.RLIMIT_CORE))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_a_sandbox_cannot_hold_all_terminals_of_the_machine(make_room: MakeRoom) -> None:
    async with make_room() as room:
        assert (await room.python(_TERMINALS)).text == f"{errno.ENOSPC} 128\n"


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_buffers_of_sockets_are_bounded_by_the_memory_limit(make_room: MakeRoom) -> None:
    """What the queues of loopback sockets hold is kernel memory; version 1 of cgroups does not count it by itself."""
    async with make_room(limits=Limits(64 * MB, 64, 100_000)) as room:
        result = await room.python(_QUEUE_IN_SOCKETS)
        assert int(result.text or "0") <= 64, result.error_text


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_a_crash_never_starts_a_program_of_the_machine(make_room: MakeRoom) -> None:
    """RLIMIT_CORE of 1 keeps a piped core_pattern from being started as root of the machine; 0 would not."""
    async with make_room() as room:
        assert (await room.python(_CORE)).text == "(1, 1)\n(1, 1)\n(64, 64)\n"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_core_limit_can_be_asked_and_not_changed(arch: Arch) -> None:
    pointer = 0x7F00_0000_0000  # its low half is zero
    assert call(arch, "prlimit64", 0, 4, 0, pointer) == ALLOW
    assert call(arch, "prlimit64", 0, 4, pointer, 0) == 0
    assert call(arch, "prlimit64", 0, 4, 0x1000, 0) == 0
    assert call(arch, "prlimit64", 0, 7, pointer, 0) == ALLOW
    if "setrlimit" in seccomp.actions(arch):
        assert call(arch, "setrlimit", 4, pointer) == 0
        assert call(arch, "setrlimit", 7, pointer) == ALLOW


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_asynchronous_io_does_not_exist(arch: Arch) -> None:
    """fs.aio-max-nr is one number for the whole machine, and nothing exempts its root."""
    assert call(arch, "io_setup", 65536) == errno.ENOSYS
