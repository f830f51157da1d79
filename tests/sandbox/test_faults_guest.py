"""A guest that has had a host before, and lies about it; and one that another host finds exactly as it should be."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox.contract import GuestProtocolError, SandboxLost
from proctor.sandbox.native.channel import GuestChannel
from proctor.sandbox.native.frames import STDERR, STDIN, STDOUT, U32, VERSION, WINDOW, FrameType, frame
from proctor.sandbox.native.launcher import BINARY

from .guests import ENV

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.sandbox.native.execs import Exec
    from proctor.sandbox.native.resume import Resumption

pytestmark = pytest.mark.anyio

AGAIN = frame(FrameType.HELLO, 0, 0, struct.pack("<II", VERSION, 7))
RESUMED = frame(FrameType.RESUMED, 0, 0, U32.pack(9))
BOTH = 1 << STDOUT | 1 << STDERR


def resume(exec_id: int, facts: int = BOTH | 16, window: int = WINDOW, size: int = 40) -> bytes:
    payload = struct.pack("<IIQQQQ", facts, window, 0, 0, 0, 0)
    return frame(FrameType.RESUME, exec_id, 0, payload[:size])


LIES = {
    "a guest that is new": [frame(FrameType.HELLO, 0, 0, struct.pack("<II", VERSION, 3))],
    "one that is not durable": [frame(FrameType.HELLO, 0, 0, struct.pack("<II", VERSION, 4)), resume(1), RESUMED],
    "a command before hello": [resume(1)],
    "a command twice": [AGAIN, resume(1), resume(1)],
    "a command without output": [AGAIN, resume(1, facts=16)],
    "unknown facts": [AGAIN, resume(1, facts=BOTH | 1 << 20)],
    "more input than there is room for": [AGAIN, resume(1, window=WINDOW + 1)],
    "half a record": [AGAIN, resume(1, size=39)],
    "more commands than there can be": [AGAIN, *(resume(number) for number in range(1, 140))],
    "more left behind than there can be": [AGAIN, *(frame(FrameType.RESUME, number) for number in range(1, 300))],
    "the same left behind twice": [AGAIN, frame(FrameType.RESUME, 1), frame(FrameType.RESUME, 1)],
    "output before all is named": [AGAIN, frame(FrameType.DATA, 1, STDOUT, b"x")],
    "named again later": [AGAIN, RESUMED, resume(1)],
    "resumed twice": [AGAIN, RESUMED, RESUMED],
    "input of a command that takes none": [AGAIN, resume(1), RESUMED, frame(FrameType.EOF, 1, STDIN)],
    "never an end of naming": [AGAIN, *[frame(FrameType.PONG, 0, 0, bytes(8))]],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_about_the_past_ends_the_sandbox_and_says_why(lie: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    channel = GuestChannel(ours, revive=lambda channel, state, facts: None)
    with theirs, contextlib.suppress(SandboxLost, BaseExceptionGroup):
        theirs.setblocking(False)
        for piece in lie:
            with contextlib.suppress(BlockingIOError):
                theirs.send(piece)
        async with anyio.create_task_group() as tasks:
            await tasks.start(channel.run)
            with anyio.fail_after(5):
                await channel.wait_lost()
    assert channel.lost is not None
    assert isinstance(channel.lost.__cause__, GuestProtocolError)


async def test_a_new_guest_that_says_it_is_old_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    channel = GuestChannel(ours)
    with theirs:
        theirs.send(AGAIN + RESUMED)
        with pytest.raises(BaseExceptionGroup):
            async with anyio.create_task_group() as tasks:
                await tasks.start(channel.run)
    assert "not the one that was expected" in str(channel.lost)


class Durable:
    """A real guest that outlives its channels."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.bell, attach = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", str(BINARY), "guest-dev"]
        descriptors = [theirs.fileno(), attach.fileno()]
        self.process = subprocess.Popen([*command, str(descriptors[0]), "-", str(descriptors[1])], pass_fds=descriptors)
        theirs.close()
        attach.close()
        self._first: socket.socket | None = ours
        self.states: dict[int, Exec] = {}
        self.facts: dict[int, Resumption] = {}
        self.settled = True
        self.chunks: list[bytes] = []
        """What the present host was told of standard output."""

    @asynccontextmanager
    async def host(self) -> AsyncIterator[GuestChannel]:
        """The next host, for a while."""
        if self._first is not None:
            channel, self._first = GuestChannel(self._first), None
        else:
            ours, theirs = socket.socketpair()
            socket.send_fds(self.bell, [b"c"], [theirs.fileno()])
            theirs.close()
            channel = GuestChannel(ours, revive=self._revive)
        async with anyio.create_task_group() as tasks:
            await tasks.start(channel.run)
            yield channel
            channel.detach()

    def _revive(self, channel: GuestChannel, state: Exec, facts: Resumption) -> None:
        # Output may come in the same breath.
        self.states[state.exec_id], self.facts[state.exec_id] = state, facts
        state.on_data = self._take
        state.settled = self.settled
        self.chunks.clear()

    def _take(self, sub: int, data: bytes) -> bool:
        self.chunks.append(data)
        return True

    def end(self) -> None:
        self.bell.close()
        self.process.wait(20)


@pytest.fixture
async def guest() -> AsyncIterator[Durable]:
    guest = Durable()
    yield guest
    guest.end()


@pytest.mark.sandbox
async def test_output_that_no_host_acknowledged_comes_again_whole(guest: Durable) -> None:
    async with guest.host() as channel:
        process = await channel.start("seq 1 100000; exit 3", env=ENV)
        taken = b""
        async for _, data in process.output():
            taken += data
            if len(taken) > 150_000:
                break
        exec_id = process.exec_id
    for number in range(3):  # a few more hosts that take a little and go
        async with guest.host():
            state, facts = guest.states[exec_id], guest.facts[exec_id]
            assert facts.acknowledged[STDOUT] <= len(taken)
            taken = taken[: facts.acknowledged[STDOUT]]
            await anyio.sleep(0.02 * number)
            if number == 2:
                with anyio.fail_after(10):
                    await state.done.wait()
                assert state.exited is not None
                assert state.exited[0] == 3
        taken += b"".join(guest.chunks)
    assert taken == b"".join(b"%d\n" % number for number in range(1, 100_001))


@pytest.mark.sandbox
async def test_an_end_is_told_to_every_host_until_one_has_taken_note(guest: Durable) -> None:
    async with guest.host() as channel:
        process = await channel.start("sleep 0.2", env=ENV)
        process._state.settled = False
        with anyio.fail_after(10):
            await process.wait()
    for guest.settled in (False, True):
        async with guest.host():
            state = guest.states[process.exec_id]
            with anyio.fail_after(10):
                await state.done.wait()
            assert state.exited is not None
        guest.states.clear()
    async with guest.host() as channel:
        assert guest.states == {}
        assert (await channel.exec(["true"], env=ENV)).ok


@pytest.mark.sandbox
async def test_a_host_that_sends_garbage_loses_the_guest_and_the_guest_loses_nothing(guest: Durable) -> None:
    async with guest.host() as channel:
        process = await channel.start("echo here; sleep 0.3; echo still", env=ENV)
        channel._send(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with anyio.fail_after(5):
            await channel.wait_lost()
    async with guest.host():
        state = guest.states[process.exec_id]
        with anyio.fail_after(10):
            await state.done.wait()
    assert b"".join(guest.chunks) == b"here\nstill\n"
