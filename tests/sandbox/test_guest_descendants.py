"""Nothing that a command started outlives it, however it tries; what is meant to stay stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox.contract import EndReason

from .guests import ENV, dev_guest

if TYPE_CHECKING:
    from proctor.sandbox.native.channel import GuestChannel

    from .conftest import MakeRoom

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

ESCAPE = r"""
import os, signal, time
for number in set(range(1, 65)) - {9, 17, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "4242"])
    os._exit(0)
os.wait()
print("daemon started", flush=True)
"""
STAY = "while True: time.sleep(4242)\n"


async def survivors(guest: GuestChannel) -> int:
    """Processes that are neither the guest nor the one that looks."""
    return sum(entry.name.isdigit() for entry in await guest.list("/proc")) - 2


@pytest.mark.parametrize("cgroup", [True, False], ids=["cgroup", "marks"])
async def test_a_double_forked_daemon_ends_with_its_command(cgroup: bool) -> None:
    async with dev_guest(cgroup=cgroup) as guest:
        result = await guest.exec(["/usr/bin/python3", "-c", ESCAPE], env=ENV)
        assert (result.text, result.exit_code, result.leftover) == ("daemon started\n", 0, 1)
        assert await survivors(guest) == 0


@pytest.mark.parametrize("cgroup", [True, False], ids=["cgroup", "marks"])
async def test_a_time_out_kills_what_ignores_every_signal(cgroup: bool) -> None:
    async with dev_guest(cgroup=cgroup) as guest:
        command = ["/usr/bin/python3", "-c", ESCAPE + STAY]
        result = await guest.exec(command, env=ENV, timeout_s=0.5)
        assert result.timed_out
        assert result.text == "daemon started\n"
        assert await survivors(guest) == 0


async def test_a_kept_service_lives_on_and_the_call_returns_with_what_was_printed() -> None:
    async with dev_guest() as guest:
        with anyio.fail_after(5):
            result = await guest.exec("(while :; do echo noise; sleep 0.01; done) & echo ready", env=ENV, keep=True)
        assert result.exit_code == 0
        assert b"ready\n" in result.stdout.data
        assert result.leftover == 0
        await anyio.sleep(0.3)
        assert await survivors(guest) >= 1  # neither blocked nor killed by the end of its streams
        await guest.exec("echo other", env=ENV)
        assert await survivors(guest) >= 1
        await guest.kill_kept(1)
        assert await survivors(guest) == 0


async def test_killing_a_process_reaches_what_it_left_behind() -> None:
    async with dev_guest() as guest:
        process = await guest.start("sleep 4242 & echo started", env=ENV, keep=True)
        assert (await process.wait()).text == "started\n"
        assert await survivors(guest) == 1
        await process.kill()
        assert await survivors(guest) == 0
        await process.kill()


async def test_a_kept_service_that_floods_is_not_stopped_by_anyone() -> None:
    async with dev_guest() as guest:
        await guest.exec("yes & echo $! > /tmp/proctor-yes-pid", env=ENV, keep=True)
        await anyio.sleep(0.2)
        state = await guest.exec(
            "cat /proc/$(cat /tmp/proctor-yes-pid)/wchan /proc/loadavg; rm /tmp/proctor-yes-pid", env=ENV
        )
        assert state.ok
        assert await guest.ping() < 1
        assert await guest.kill_all() == 0


async def test_a_time_out_kills_even_with_keep() -> None:
    async with dev_guest() as guest:
        result = await guest.exec("sleep 4242 & sleep 4242", env=ENV, keep=True, timeout_s=0.3)
        assert result.timed_out
        assert await survivors(guest) == 0


async def test_many_kept_services_stay_and_too_many_are_killed_and_counted() -> None:
    async with dev_guest() as guest:
        leftovers = [(await guest.exec("sleep 4242 &", env=ENV, keep=True)).leftover for _ in range(260)]
        assert leftovers == [0] * 256 + [1] * 4
        assert await survivors(guest) == 256
        assert await guest.kill_all() == 0
        assert await survivors(guest) == 0


async def test_a_pipe_that_was_passed_to_another_command_keeps_nobody_waiting(tmp_path: object) -> None:
    path = f"{tmp_path}/socket"
    holder = (
        f"import socket, time, array\ns = socket.socket(socket.AF_UNIX); s.bind({path!r}); s.listen()\n"
        "print('ready', flush=True)\nc, _ = s.accept()\n"
        "m = socket.recv_fds(c, 10, 1)\nprint('held', flush=True)\nwhile True: time.sleep(4242)"
    )
    giver = (
        f"import socket\ns = socket.socket(socket.AF_UNIX); s.connect({path!r})\n"
        "socket.send_fds(s, [b'x'], [1])\nprint('given')"
    )
    async with dev_guest() as guest:
        process = await guest.start(["/usr/bin/python3", "-c", holder], env=ENV)
        chunks = process.output()
        assert await anext(chunks) == ("stdout", b"ready\n")
        with anyio.fail_after(10):
            result = await guest.exec(["/usr/bin/python3", "-c", giver], env=ENV)
        assert result.text == "given\n"
        assert await anext(chunks) == ("stdout", b"held\n")
        await process.kill()
        assert (await process.wait()).reason is EndReason.KILLED


async def test_zombies_are_reaped() -> None:
    async with dev_guest() as guest:
        await guest.exec("for i in $(seq 200); do (true & ) ; done; sleep 0.2", env=ENV, keep=True)
        result = await guest.exec("cat /proc/[0-9]*/stat | grep -c ' Z '", env=ENV)
    assert result.text == "0\n"


async def test_kill_all_beats_a_storm_of_forks() -> None:
    storm = "import os\nwhile True:\n  try:\n    if os.fork(): os.setsid()\n  except OSError: pass"
    async with dev_guest() as guest:
        # A limit of our own: this runs outside any sandbox.
        command = ["/bin/sh", "-c", 'ulimit -u 400 2>/dev/null; exec "$@"', "sh", "/usr/bin/python3", "-c", storm]
        process = await guest.start(["/bin/setpriv", "--reuid=65534", "--clear-groups", *command], env=ENV)
        await anyio.sleep(0.5)
        assert await guest.kill_all() == 0
        assert (await process.wait()).signal == 9
        assert await survivors(guest) == 0


async def test_a_fork_bomb_in_a_sandbox_ends_with_its_time_out(make_room: MakeRoom) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork() or os.setsid()\n  except OSError: pass"
    async with make_room() as room:
        result = await room.python(bomb, timeout_s=0.7)
        assert result.timed_out
        assert result.duration_s < 8
        assert await survivors(room.channel) == 0


async def test_a_sandboxed_daemon_ends_with_its_command(make_room: MakeRoom) -> None:
    async with make_room() as room:
        result = await room.python(ESCAPE + STAY, timeout_s=1)
        assert result.timed_out
        assert await survivors(room.channel) == 0
        assert await room.channel.kill_all() == 0


async def test_kill_all_in_a_sandbox_reaches_every_group(make_room: MakeRoom) -> None:
    async with make_room() as room:
        for _ in range(3):
            await room.sh("sleep 4242 & setsid sleep 4242 & echo", keep=True)
        process = await room.channel.start("sleep 4242", env=ENV)
        assert await room.channel.kill_all() == 0
        assert (await process.wait()).reason is EndReason.KILLED
        assert await survivors(room.channel) == 0
