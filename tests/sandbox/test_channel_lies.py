"""The host's end against guests that lie, flood, stall and send garbage."""

from __future__ import annotations

import contextlib
import errno
import random
import struct
import tracemalloc

import anyio
import pytest

from proctor.common import InfraError
from proctor.sandbox.contract import EndReason, GuestProtocolError, OutputLimit, ProctorError, SandboxLost
from proctor.sandbox.native.frames import EXITED, PAYLOAD_MAX, STDERR, STDIN, STDOUT, U32, WINDOW, FrameType, frame

from .liars import HELLO, liar

pytestmark = pytest.mark.anyio

OVER = EXITED.pack(0, 0, 1, 1, 1, 0)


@pytest.mark.parametrize(
    "hello",
    [
        frame(FrameType.HELLO, 0, 0, struct.pack("<II", 1, 0)),
        frame(FrameType.HELLO, 0, 0, b"short"),
        frame(FrameType.PONG, 0, 0, bytes(8)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_wrong_greeting_is_no_guest(hello: bytes) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with liar(hello=hello):
            pass
    assert caught.group_contains(SandboxLost)


LIES = {
    "output of nobody": [frame(FrameType.DATA, 99, STDOUT, b"x")],
    "output on stdin": [frame(FrameType.DATA, 1, STDIN, b"x")],
    "output of an unknown stream": [frame(FrameType.DATA, 1, 3, b"x")],
    "empty output": [frame(FrameType.DATA, 1, STDOUT)],
    "a second hello": [HELLO],
    "a pong that nobody asked for": [frame(FrameType.PONG, 0, 0, bytes(8))],
    "killed without a request": [frame(FrameType.KILLED, 0, 0, bytes(4))],
    "closed before the exit": [frame(FrameType.CLOSED, 1, 0, bytes(4))],
    "closed with open streams": [frame(FrameType.EXITED, 1, 0, OVER), frame(FrameType.CLOSED, 1, 0, bytes(4))],
    "exited twice": [frame(FrameType.EXITED, 1, 0, OVER)] * 2,
    "started twice": [frame(FrameType.STARTED, 1, 0, bytes(4))] * 2,
    "ended twice": [frame(FrameType.EOF, 1, STDERR)] * 2,
    "output after its end": [frame(FrameType.EOF, 1, STDOUT), frame(FrameType.DATA, 1, STDOUT, b"x")],
    "credit beyond the window": [frame(FrameType.CREDIT, 1, STDIN, U32.pack(1))],
    "credit for output": [frame(FrameType.CREDIT, 1, STDOUT, U32.pack(1))],
    "a malformed exit": [frame(FrameType.EXITED, 1, 0, b"x")],
    "failed after the exit": [
        frame(FrameType.EXITED, 1, 0, OVER),
        frame(FrameType.FAILED, 1, 0, U32.pack(2) + b"exec"),
    ],
    "a failure without a step": [frame(FrameType.FAILED, 1, 0, U32.pack(2))],
    "an unknown type": [frame(77, 1)],  # type: ignore[arg-type]
    "a request": [frame(FrameType.EXEC, 1, 0, b"")],
    "a reserved field": [struct.pack("<IIBBH", 0, 1, FrameType.EOF, STDOUT, 1)],
    "an overlong frame": [struct.pack("<IIBBH", PAYLOAD_MAX + 1, 1, FrameType.DATA, STDOUT, 0)],
    "gone without having stayed": [frame(FrameType.GONE, 1)],
    "a word after the end": [
        frame(FrameType.FAILED, 1, 0, U32.pack(2) + b"chdir"),
        frame(FrameType.DATA, 1, STDOUT, b"x"),
    ],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_ends_the_sandbox_and_says_why(lie: list[bytes]) -> None:
    async with liar() as (guest, channel):
        async with anyio.create_task_group() as tasks:

            async def waiter() -> None:
                with contextlib.suppress(SandboxLost):
                    result = await channel.exec(["/bin/true"], env={})
                    assert result.exit_code == 126  # the one lie that comes after an honest end

            tasks.start_soon(waiter)
            await guest.hear()
            await guest.say(*lie)
            with anyio.fail_after(5):
                lost = await channel.wait_lost()
        assert lost.reason is EndReason.GUEST_LOST
        assert isinstance(lost.__cause__, GuestProtocolError)
        with pytest.raises(SandboxLost):
            await channel.exec(["/bin/true"], env={})


async def test_more_output_than_was_granted_ends_the_sandbox() -> None:
    async with liar() as (guest, channel), anyio.create_task_group() as tasks:

        async def waiter() -> None:
            process = await channel.start(["/bin/true"], env={})
            with pytest.raises(SandboxLost):
                await process.wait()

        tasks.start_soon(waiter)
        await guest.hear()
        for _ in range(WINDOW // PAYLOAD_MAX + 1):
            await guest.say(frame(FrameType.DATA, 1, STDOUT, bytes(PAYLOAD_MAX)))
        await guest.say(frame(FrameType.STARTED, 1, 0, bytes(4)))
        with anyio.fail_after(5):
            assert isinstance((await channel.wait_lost()).__cause__, GuestProtocolError)


async def test_a_flood_leaves_no_more_in_memory_than_was_asked_for() -> None:
    limit = OutputLimit(100_000, 100_000)
    async with liar() as (guest, channel):
        async with anyio.create_task_group() as tasks:

            async def flood() -> None:
                await guest.hear()
                chunk = frame(FrameType.DATA, 1, STDOUT, bytes(PAYLOAD_MAX))
                while not channel.lost:
                    await guest.say(chunk)  # credit is given as fast as we take it, so this never ends by itself

            async def stop() -> None:
                with anyio.move_on_after(0.7):
                    await channel.exec(["/bin/yes"], env={}, limit=limit)
                channel.close()

            tracemalloc.start()
            tasks.start_soon(flood)
            tasks.start_soon(stop)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("step", "number", "expected"),
    [
        ("exec", errno.ENOENT, (127, None)),
        ("exec", errno.EACCES, (126, None)),
        ("user", errno.ENOENT, (126, None)),
        ("clone", errno.EAGAIN, (126, EndReason.PIDS)),
        ("clone", errno.ENOMEM, (126, EndReason.OOM)),
        ("cgroup", errno.ENOMEM, (126, EndReason.OOM)),
        ("cgroup", errno.EPERM, None),
        ("seccomp", errno.EINVAL, None),
        ("table", errno.EAGAIN, None),
    ],
)
async def test_only_what_the_candidate_cannot_cause_is_a_fault_of_the_machinery(
    step: str, number: int, expected: tuple[int, EndReason | None] | None
) -> None:
    outcomes: list[object] = []

    async with liar() as (guest, channel), anyio.create_task_group() as tasks:

        async def waiter() -> None:
            try:
                result = await channel.exec(["/bin/x"], env={})
                outcomes.append((result.exit_code, result.reason))
            except InfraError as error:
                outcomes.append(None if step in error.message else error)

        tasks.start_soon(waiter)
        await guest.hear()
        await guest.say(frame(FrameType.FAILED, 1, 0, U32.pack(number) + step.encode()))
    assert outcomes == [expected]


async def test_a_guest_that_hangs_up_is_lost() -> None:
    async with liar() as (guest, channel), anyio.create_task_group() as tasks:

        async def waiter() -> None:
            with pytest.raises(SandboxLost, match="has ended"):
                await channel.read("/etc/passwd")

        tasks.start_soon(waiter)
        await guest.hear()
        guest.leave()


async def test_a_guest_that_does_not_kill_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.sandbox.native.channel._KILL_S", 0.2)
    async with liar() as (_, channel):
        with anyio.fail_after(5), pytest.raises(SandboxLost, match="could not kill"):
            await channel.exec(["/bin/sleep", "9"], env={}, timeout_s=0.1)


@pytest.mark.parametrize("call", ["ping", "kill_all"])
async def test_a_guest_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr("proctor.sandbox.native.channel._KILL_S", 0.2)
    async with liar() as (_, channel):
        with anyio.fail_after(5), pytest.raises(SandboxLost, match="did not answer"):
            await (channel.ping() if call == "ping" else channel.kill_all(deadline_s=0.2))


async def test_a_malformed_list_of_files_is_a_broken_protocol() -> None:
    async with liar() as (guest, channel), anyio.create_task_group() as tasks:

        async def waiter() -> None:
            with pytest.raises(GuestProtocolError):
                await channel.list("/")

        tasks.start_soon(waiter)
        await guest.hear()
        ends = [frame(FrameType.EOF, 1, STDOUT), frame(FrameType.EOF, 1, STDERR)]
        await guest.say(frame(FrameType.DATA, 1, STDOUT, b"D" * 100), *ends)
        await guest.say(frame(FrameType.EXITED, 1, 0, OVER), frame(FrameType.CLOSED, 1, 0, bytes(4)))


def _random_frame(rng: random.Random) -> bytes:
    kind = rng.choice(list(FrameType))
    payload = rng.choice([b"", bytes(4), bytes(8), OVER, rng.randbytes(rng.randint(0, 300)), U32.pack(13) + b"exec"])
    data = bytearray(frame(kind, rng.choice([0, 1, 2, 3, 99]), rng.choice([0, 1, 2, 3, 9]), payload))
    if rng.random() < 0.2:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("seed", range(60))
async def test_random_frames_end_in_results_or_in_one_known_error(seed: int) -> None:
    rng = random.Random(seed)
    outcomes: list[object] = []

    async with liar() as (guest, channel):

        async def call(number: int) -> None:
            try:
                if number % 3 == 0:
                    outcomes.append(await channel.exec("x", env={}, stdin=bytes(10)))
                elif number % 3 == 1:
                    outcomes.append(await channel.list("/"))
                else:
                    outcomes.append(await (await channel.start("x", env={})).wait())
            except (ProctorError, InfraError) as error:
                outcomes.append(error)

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(call, number)
            await guest.hear(3 * 12)
            for _ in range(rng.randint(1, 40)):
                await guest.say(_random_frame(rng))
            guest.leave()
    assert len(outcomes) == 3
