"""The system call filter: the compiled program against its table, and the kernel's answers inside a sandbox."""

from __future__ import annotations

import errno
import struct
from typing import TYPE_CHECKING, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.common import RefusedError
from proctor.sandbox.native import seccomp
from proctor.sandbox.native.syscall_numbers import Arch, numbers

if TYPE_CHECKING:
    from .conftest import MakeRoom

ARCHITECTURES: tuple[Arch, ...] = get_args(Arch)
_TOKEN = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = "allow", "kill"


def run(program: bytes, number: int, arch: int, arguments: tuple[int, ...] = ()) -> Literal["allow", "kill"] | int:
    """Interpret a filter: `allow`, `kill`, or the errno it answers with."""
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator = position = 0
    for _ in range(len(code)):
        operation, jump_true, jump_false, value = code[position]
        position += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x05:
            position += value
        elif operation == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(value, value & 0xFFFF)  # type: ignore[return-value]
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            position += jump_true if holds else jump_false
    raise AssertionError("the program does not end")


def call(arch: Arch, name: str, *arguments: int) -> Literal["allow", "kill"] | int:
    return run(seccomp.program(arch), numbers(arch)[name], _TOKEN[arch], arguments)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_known_call_is_listed_exactly_once(arch: Arch) -> None:
    assert set(seccomp.actions(arch)) == set(numbers(arch))
    listed = (seccomp._ALLOWED + seccomp._REFUSED + " " + seccomp._MISSING).split()
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_program_answers_as_the_table_says(arch: Arch) -> None:
    expected: dict[str, str | int] = {"allow": ALLOW, "refuse": errno.EPERM, "missing": errno.ENOSYS}
    wrong = {
        name: call(arch, name)
        for name, action in seccomp.actions(arch).items()
        if action in expected and call(arch, name) != expected[action]
    }
    assert wrong == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@given(number=st.integers(0, 2**32 - 1))
@settings(max_examples=300)
def test_a_call_that_is_not_in_the_table_does_not_exist(arch: Arch, number: int) -> None:
    if number not in numbers(arch).values():
        assert run(seccomp.program(arch), number, _TOKEN[arch]) == errno.ENOSYS


@pytest.mark.parametrize("arch", ARCHITECTURES)
@given(token=st.integers(0, 2**32 - 1), number=st.integers(0, 500))
def test_a_foreign_calling_convention_kills(arch: Arch, token: int, number: int) -> None:
    if token != _TOKEN[arch]:
        assert run(seccomp.program(arch), number, token) == KILL


def test_i386_kills_and_x32_does_not_exist() -> None:
    assert run(seccomp.program("x86_64"), 11, 0x40000003) == KILL
    assert run(seccomp.program("x86_64"), 0x40000000, _TOKEN["x86_64"]) == errno.ENOSYS


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bit", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
@given(other=st.integers(0, 2**64 - 1))
def test_a_namespace_flag_is_refused_whatever_else_is_asked(arch: Arch, bit: int, other: int) -> None:
    assert call(arch, "clone", other | bit) == errno.EPERM
    assert call(arch, "unshare", other | bit) == errno.EPERM


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_threads_and_processes_can_be_made(arch: Arch) -> None:
    assert call(arch, "clone", 17) == ALLOW
    assert call(arch, "clone", 0x3D0F00) == ALLOW  # what pthread_create asks for
    assert call(arch, "unshare", 0x400) == ALLOW  # CLONE_FILES
    assert call(arch, "unshare", 0x80) == errno.EPERM  # CLONE_NEWTIME


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (0x5401, ALLOW),  # TCGETS
        (0x5413, ALLOW),  # TIOCGWINSZ
        (0x541B, ALLOW),  # FIONREAD
        (0x8927, ALLOW),  # SIOCGIFHWADDR
        (0x80086601, ALLOW),  # FS_IOC_GETFLAGS
        (0x40049409, ALLOW),  # FICLONE
        (0x5412, errno.EPERM),  # TIOCSTI
        (0x541C, errno.EPERM),  # TIOCLINUX
        (0x5423, errno.EPERM),  # TIOCSETD
        (0x40086602, errno.ENOTTY),  # FS_IOC_SETFLAGS
        (0x401C5820, errno.ENOTTY),  # FS_IOC_FSSETXATTR
        (0xC0C0586D, errno.ENOTTY),  # XFS_IOC_SWAPEXT
        (0xC0045877, errno.ENOTTY),  # FIFREEZE
        (0x50009401, errno.ENOTTY),  # a btrfs one
        (0xFFFFFFFF_00005412, errno.EPERM),  # the kernel looks at the low half only
    ],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ioctl(arch: Arch, command: int, answer: str | int) -> None:
    assert call(arch, "ioctl", 0, command) == answer


@pytest.mark.parametrize(
    ("family", "protocol", "answer"),
    [
        (1, 0, ALLOW),
        (2, 0, ALLOW),
        (2, 6, ALLOW),
        (10, 17, ALLOW),
        (10, 58, ALLOW),
        (2, 132, errno.EPROTONOSUPPORT),  # SCTP
        (2, 255, errno.EPROTONOSUPPORT),  # raw
        (16, 0, ALLOW),  # routes
        (16, 12, errno.EPROTONOSUPPORT),  # netfilter
        (16, 16, errno.EPROTONOSUPPORT),  # generic netlink
        (17, 3, errno.EAFNOSUPPORT),  # packets
        (38, 0, errno.EAFNOSUPPORT),  # kernel crypto
        (40, 0, errno.EAFNOSUPPORT),  # vsock
        (0, 0, errno.EAFNOSUPPORT),
    ],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_socket(arch: Arch, family: int, protocol: int, answer: str | int) -> None:
    assert call(arch, "socket", family, 1, protocol) == answer


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_personality(arch: Arch) -> None:
    assert call(arch, "personality", 0xFFFFFFFF) == ALLOW
    assert call(arch, "personality", 0x40000) == ALLOW
    assert call(arch, "personality", 0x400000) == errno.EPERM  # READ_IMPLIES_EXEC


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_program_fits_the_kernels_limit(arch: Arch) -> None:
    assert len(seccomp.program(arch)) // 8 <= 4096


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(RefusedError, match="no system call filter for riscv64"):
        seccomp.program("riscv64")


_PROBE = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number, arguments in {calls!r}:
    ctypes.set_errno(0)
    libc.syscall(number, *[ctypes.c_long(a) for a in arguments])
    print(name, ctypes.get_errno())
"""


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_the_kernel_refuses_inside_what_the_table_refuses(make_room: MakeRoom) -> None:
    import platform

    arch: Arch = "aarch64" if platform.machine() == "aarch64" else "x86_64"
    answers = {"refuse": errno.EPERM, "missing": errno.ENOSYS}
    expected = {name: answers[action] for name, action in seccomp.actions(arch).items() if action in answers}
    calls = [(name, numbers(arch)[name], (0, 0, 0)) for name in expected]
    async with make_room() as room:
        result = await room.python(_PROBE.format(calls=calls))
    found = {name: int(number) for name, number in (line.split() for line in result.text.splitlines())}
    assert found == expected


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_a_32_bit_call_kills_the_process(make_room: MakeRoom) -> None:
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("int 0x80 exists on x86_64 only")
    program = """
import ctypes, mmap
code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20 (getpid); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=7); page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("before", flush=True); ctypes.CFUNCTYPE(ctypes.c_int)(address)(); print("after")
"""
    async with make_room() as room:
        result = await room.python(program)
    assert (result.text, result.signal) == ("before\n", 31)  # SIGSYS


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_ordinary_programs_do_not_notice(make_room: MakeRoom) -> None:
    program = """
import concurrent.futures, multiprocessing, socket, sqlite3, subprocess, tempfile, threading
socket.getaddrinfo("127.0.0.1", 80)
with concurrent.futures.ThreadPoolExecutor(4) as pool: list(pool.map(str, range(100)))
subprocess.run(["/bin/true"], check=True)
with multiprocessing.get_context("fork").Pool(2) as pool: pool.map(abs, [1, -2])
with tempfile.NamedTemporaryFile() as file: sqlite3.connect(file.name).execute("create table t (x)")
print("fine")
"""
    async with make_room() as room:
        result = await room.python(program)
    assert (result.text, result.error_text) == ("fine\n", "")
