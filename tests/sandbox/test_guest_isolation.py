"""The guest and its children as root inside a real sandbox sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox.contract import EndReason, FileError, OutputLimit
from proctor.sandbox.native.guestfiles import check_operation

from .guests import ENV

if TYPE_CHECKING:
    from proctor.sandbox.native.execs import GuestProcess

    from .conftest import MakeRoom, Room

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


async def pending_write(room: Room) -> GuestProcess:
    """A file operation of root's that waits for its input: guest code that runs with the ids of the sandbox."""
    state = await room.channel._start_operation("write", ("/tmp/pending", "644"), user="root", stdin=True)
    process = room.channel._operation_process(state, OutputLimit())
    await process.write_stdin(b"x")
    for _ in range(500):
        if ".proctor-write" in str(await room.channel.list("/tmp")):
            break  # its temporary file says that it runs
    return process


FIND = "import os\npid = next(p for p in os.listdir('/proc') if p.isdigit() and p != '1' and int(p) != os.getpid())\n"


@pytest.mark.parametrize("name", ["mem", "environ", "maps", "auxv", "stack", "syscall", "personality", "io"])
@pytest.mark.parametrize("whose", ["guest", "file operation"])
async def test_memory_and_state_cannot_be_read(make_room: MakeRoom, whose: str, name: str) -> None:
    async with make_room() as room:
        process = await pending_write(room)
        find = FIND if whose == "file operation" else "pid = 1\n"
        result = await room.python(find + f"print(open(f'/proc/{{pid}}/{name}', 'rb').read(1))")
        await process.kill()
    assert result.exit_code == 1
    assert "PermissionError" in result.error_text or "FileNotFoundError" in result.error_text


@pytest.mark.parametrize("name", ["fd", "fdinfo", "map_files", "ns"])
@pytest.mark.parametrize("whose", ["guest", "file operation"])
async def test_descriptors_cannot_be_taken(make_room: MakeRoom, whose: str, name: str) -> None:
    async with make_room() as room:
        process = await pending_write(room)
        find = FIND if whose == "file operation" else "import os\npid = 1\n"
        link = "[os.readlink(f'{d}/{n}') for n in os.listdir(d)]"
        result = await room.python(find + f"d = f'/proc/{{pid}}/{name}'\nprint({link})")
        await process.kill()
    assert result.exit_code == 1
    assert "PermissionError" in result.error_text


async def test_pidfd_getfd_and_ptrace_are_refused(make_room: MakeRoom) -> None:
    attack = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for target in (1, int(pid)):\n"
        "  fd = os.pidfd_open(target)\n"
        "  print([libc.syscall(438, fd, n, 0) for n in range(8)], libc.ptrace(16, target, 0, 0))\n"
    )
    async with make_room() as room:
        process = await pending_write(room)
        result = await room.python(FIND + attack)
        await process.kill()
    assert result.text.split("\n")[:2] == ["[-1, -1, -1, -1, -1, -1, -1, -1] -1"] * 2


async def test_process_1_survives_every_signal(make_room: MakeRoom) -> None:
    async with make_room() as room:
        await room.python("import os\nfor n in range(1, 65):\n  try: os.kill(1, n)\n  except OSError: pass")
        await room.sh("kill -STOP 1; kill -KILL 1; true")
        assert await room.channel.ping() < 5
        assert (await room.sh("echo alive")).text == "alive\n"


async def test_a_file_operation_that_is_killed_from_inside_is_an_error_of_the_file(make_room: MakeRoom) -> None:
    async with make_room() as room:
        process = await pending_write(room)
        assert (await room.python(FIND + "os.kill(int(pid), 9)")).ok
        with pytest.raises(FileError, match="killed"), anyio.fail_after(5):
            check_operation(await process.wait(), "/tmp/pending")
        assert await room.channel.read("/etc/group")


async def test_a_stopped_command_is_killed_by_its_time_out(make_room: MakeRoom) -> None:
    async with make_room() as room:
        result = await room.sh("kill -STOP $$", timeout_s=0.3)
    assert result.timed_out


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        (None, "0 0 0"),
        ("root", "0 0 0"),
        ("user", "1000 1000 1000 2000"),
        ("1000", "1000 1000 1000 2000"),
        ("1000:2000", "1000 2000 2000"),
        ("user:extra", "1000 2000 2000"),
        ("4321", "4321 0 0"),
        ("4321:99", "4321 99 99"),
        ("odd-only", "77 77 77"),
    ],
)
async def test_users_are_those_of_the_sandbox(make_room: MakeRoom, user: str | None, expected: str) -> None:
    async with make_room() as room:
        await room.channel.write("/etc/group", b"root:x:0:\nuser:x:1000:\nextra:x:2000:nobody,user\nbroken\n:::\n")
        await room.channel.write(
            "/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nbad line\nuser:x:1000:1000::/tmp:/bin/sh\n" + b"x" * 100_000
            + b"\nhuge:x:99999999999:1::/:/\nodd-only:x:77:77::/:/bin/sh"
        )  # fmt: skip
        result = await room.channel.exec("echo $(id -u) $(id -g) $(id -G)", env=ENV, user=user)
    assert result.text.split()[:2] == expected.split()[:2], result.error_text
    assert sorted(result.text.split()[2:]) == sorted(expected.split()[2:])


async def test_another_user_has_no_capabilities_and_its_own_home(make_room: MakeRoom) -> None:
    async with make_room() as room:
        facts = await room.channel.exec("grep Cap /proc/self/status; echo $HOME $USER $LOGNAME", env=ENV, user="user")
        refused = await room.channel.exec("cat /etc/shadow /root/x > /dev/null; touch /etc/x", env=ENV, user="user")
    lines = dict(line.split() for line in facts.text.splitlines()[:5])
    assert [int(lines[f"Cap{name}:"], 16) for name in ("Inh", "Prm", "Eff", "Amb")] == [0, 0, 0, 0]
    assert facts.text.splitlines()[5] == "/tmp user user"
    assert refused.exit_code == 1


async def test_files_belong_to_who_writes_them(make_room: MakeRoom) -> None:
    async with make_room() as room:
        await room.channel.write("/tmp/theirs", b"x", user="user")
        await room.channel.write("/tmp/ours", b"x")
        assert (await room.channel.stat("/tmp/theirs")).uid == 1000
        assert (await room.channel.stat("/tmp/ours")).uid == 0
        with pytest.raises(FileError):
            await room.channel.write("/etc/passwd", b"x", user="user")
        with pytest.raises(FileError):
            await room.channel.write("/tmp/ours", b"x", user="user")


@pytest.mark.parametrize(
    "sabotage",
    [
        "rm /etc/passwd; mkfifo /etc/passwd",
        "rm /etc/passwd; mkdir /etc/passwd",
        "rm /etc/passwd; ln -s passwd /etc/passwd",
        "rm /etc/passwd; ln -s /proc/kmsg /etc/passwd",
        "rm /etc/passwd; ln -s /dev/zero /etc/passwd",
        "truncate -s 0 /etc/passwd; truncate -s 1T /etc/passwd",
    ],
)
async def test_a_sabotaged_user_list_stops_a_command_but_nobody_else(make_room: MakeRoom, sabotage: str) -> None:
    async with make_room() as room:
        await room.sh(sabotage)
        with anyio.fail_after(10):
            result = await room.channel.exec(["/bin/true"], env=ENV, user="user")
        assert result.exit_code == 126
        assert result.error_text.startswith("proctor: user: ")
        assert await room.channel.ping() < 5


async def test_without_a_user_list_there_is_still_a_root(make_room: MakeRoom) -> None:
    async with make_room() as room:
        await room.sh("rm /etc/passwd /etc/group")
        result = await room.channel.exec("id -u; echo $HOME", env=ENV, user="root")
    assert result.text == "0\n/root\n"


async def test_a_removed_working_directory_is_a_result(make_room: MakeRoom) -> None:
    async with make_room() as room:
        await room.sh("mkdir /w")
        assert (await room.channel.exec("rm -rf /w; pwd", env=ENV, cwd="/w")).exit_code == 0
        assert (await room.channel.exec(["/bin/true"], env=ENV, cwd="/w")).exit_code == 126


async def test_exhausted_processes_are_named(make_room: MakeRoom) -> None:
    async with make_room() as room:
        # It keeps trying: its first refusal may have come while one of the commands below held the last place.
        hoard = (
            "import os, time\nwhile True:\n  try:\n    if not os.fork(): time.sleep(4242)\n"
            "  except OSError: time.sleep(0.01)"
        )
        hog = await room.channel.start(["/usr/bin/python3", "-c", hoard], env=ENV)
        result = None
        with anyio.fail_after(20):
            while result is None or result.exit_code == 0:
                result = await room.channel.exec(["/bin/true"], env=ENV)
        await hog.kill()
        assert (await hog.wait()).reason is EndReason.KILLED
    assert (result.exit_code, result.reason) == (126, EndReason.PIDS)


async def test_children_are_preferred_by_the_oom_killer_and_run_at_normal_priority(make_room: MakeRoom) -> None:
    async with make_room() as room:
        result = await room.sh("cat /proc/self/oom_score_adj; nice")
    assert int(result.text.split()[0]) > 0
    assert result.text.split()[1] == "0"
