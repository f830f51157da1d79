"""The host's half of the carried network against guests that lie, flood and send garbage."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.lowlevel
import pytest

from proctor.common import InfraError
from proctor.sandbox.contract import EndReason, GuestProtocolError, ProctorError, SandboxLost
from proctor.sandbox.native.carried import CONNECTIONS_MAX, QUERIES_MAX, CarriedStream, Refusals, StreamReset
from proctor.sandbox.native.frames import FIRST_WINDOW, GUEST_ID, HEADER, U32, FrameType, frame

from .carrying import WEB
from .liars import liar

if TYPE_CHECKING:
    from proctor.sandbox.native.channel import GuestChannel

    from .liars import Liar

pytestmark = pytest.mark.anyio

NAMES, NAMES_TCP, LISTENER, DIAL = 1, 2, 3, 4
"""The host's numbers, in the order in which `carrying` asks."""
ONE, TWO, NEW = (GUEST_ID | number for number in (1, 2, 3))
QUERY = GUEST_ID | 77
OK = U32.pack(0)


def accepted(number: int, on: int = LISTENER) -> bytes:
    """A program has dialled."""
    return frame(FrameType.ACCEPTED, number, 0, struct.pack("<I4sH", on, bytes([127, 0, 0, 1]), 40_000))


def connected(request: int, number: int, error: int = 0) -> bytes:
    """A dial of the host was answered."""
    return frame(FrameType.CONNECTED, request, 0, struct.pack("<iI", error, number))


def data(number: int, payload: bytes = b"x") -> bytes:
    """Bytes of a program."""
    return frame(FrameType.DATA, number, 0, payload)


async def carrying(guest: Liar, channel: GuestChannel, tasks: anyio.abc.TaskGroup) -> list[CarriedStream]:
    """A host that carries, with a listener, a dial that waits, and connection ONE; the guest told the truth so far."""
    streams: list[CarriedStream] = []

    async def dns(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        await anyio.sleep_forever()
        return None

    async def dial() -> None:
        with contextlib.suppress(SandboxLost):
            await channel.connect(8000, timeout_s=60)

    async def listen() -> None:
        with contextlib.suppress(SandboxLost):
            await channel.listen(*WEB)

    channel.carry(streams.append, dns)
    tasks.start_soon(listen)
    await guest.hear(3 * (HEADER.size + 6))
    tasks.start_soon(dial)
    await guest.hear(4 * (HEADER.size + 6))
    await guest.say(*(frame(FrameType.LISTENING, number, 0, OK) for number in (NAMES, NAMES_TCP, LISTENER)))
    await guest.say(accepted(ONE))
    with anyio.fail_after(5):
        while not streams:
            await anyio.lowlevel.checkpoint()
    return streams


LIES: dict[str, list[bytes]] = {
    "a connection to nobody": [accepted(TWO, on=99)],
    "a connection to a dial": [accepted(TWO, on=DIAL)],
    "a connection twice": [accepted(ONE)],
    "a connection with a number of ours": [accepted(77)],
    "a connection with a number of a command": [accepted(LISTENER)],
    "a malformed connection": [frame(FrameType.ACCEPTED, TWO, 0, b"x")],
    "more connections than places": [accepted(NEW + i) for i in range(CONNECTIONS_MAX)],
    "a dial answered twice": [connected(DIAL, TWO, 111), connected(DIAL, TWO)],
    "a dial of nobody": [connected(99, TWO)],
    "a dial that gives an open connection": [connected(DIAL, ONE)],
    "a dial that gives a number of ours": [connected(DIAL, 5)],
    "a malformed answer to a dial": [frame(FrameType.CONNECTED, DIAL, 0, b"x")],
    "bytes of nobody": [data(TWO)],
    "no bytes": [data(ONE, b"")],
    "bytes of a sub-stream": [frame(FrameType.DATA, ONE, 1, b"x")],
    "bytes after the end": [frame(FrameType.EOF, ONE), data(ONE)],
    "bytes after the last frame": [frame(FrameType.RESET, ONE, 0, OK), data(ONE)],
    "bytes beyond the window": [data(ONE, bytes(FIRST_WINDOW)), data(ONE)],
    "an end twice": [frame(FrameType.EOF, ONE)] * 2,
    "an end with content": [frame(FrameType.EOF, ONE, 0, b"x")],
    "a close that is ours to say": [frame(FrameType.EOF, ONE, 1)],
    "credit beyond the window": [frame(FrameType.CREDIT, ONE, 0, U32.pack(1))],
    "malformed credit": [frame(FrameType.CREDIT, ONE, 0, b"x")],
    "closed while open": [frame(FrameType.CLOSED, ONE)],
    "closed while half open": [frame(FrameType.EOF, ONE), frame(FrameType.CLOSED, ONE)],
    "a malformed reset": [frame(FrameType.RESET, ONE)],
    "a reset of nobody": [frame(FrameType.RESET, TWO, 0, OK)],
    "an exit of a connection": [frame(FrameType.EXITED, ONE)],
    "a listener of nobody": [frame(FrameType.LISTENING, 99, 0, OK)],
    "a listener twice": [frame(FrameType.LISTENING, LISTENER, 0, OK)],
    "a malformed listener": [frame(FrameType.LISTENING, LISTENER)],
    "the end of a listener that nobody ended": [frame(FrameType.UNLISTENED, LISTENER)],
    "the end of the name server": [frame(FrameType.UNLISTENED, NAMES)],
    "a query with a number of ours": [frame(FrameType.QUERY, 77, 0, bytes(20))],
    "a query twice": [frame(FrameType.QUERY, QUERY, 0, bytes(20))] * 2,
    "a query too short": [frame(FrameType.QUERY, QUERY, 0, bytes(11))],
    "a query too long": [frame(FrameType.QUERY, QUERY, 0, bytes(4097))],
    "more queries than places": [frame(FrameType.QUERY, QUERY + i, 0, bytes(20)) for i in range(QUERIES_MAX + 1)],
    "malformed refusals": [frame(FrameType.REFUSED, 0, 0, b"x")],
    "refusals of a stream": [frame(FrameType.REFUSED, 9, 0, bytes(12))],
    "our own request": [frame(FrameType.LISTEN, NEW, 0, bytes(6))],
    "a type of the future": [frame(31, 0)],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_ends_the_sandbox_and_says_why(lie: list[bytes]) -> None:
    async with liar() as (guest, channel), anyio.create_task_group() as tasks:
        (stream,) = await carrying(guest, channel, tasks)
        await guest.say(*lie)
        with anyio.fail_after(5):
            lost = await channel.wait_lost()
        assert lost.reason is EndReason.GUEST_LOST
        assert isinstance(lost.__cause__, GuestProtocolError)
        stream._chunks.clear()
        with pytest.raises(StreamReset):
            await stream.receive()


@pytest.mark.parametrize(
    "word",
    [
        frame(FrameType.LISTENING, 1, 0, OK),
        frame(FrameType.QUERY, QUERY, 0, bytes(20)),
        frame(FrameType.REFUSED, 0, 0, bytes(12)),
        accepted(ONE, on=1),
    ],
)
async def test_a_sandbox_without_a_network_has_nothing_to_say_of_one(word: bytes) -> None:
    async with liar() as (guest, channel):
        await guest.say(word)
        with anyio.fail_after(5):
            assert isinstance((await channel.wait_lost()).__cause__, GuestProtocolError)


async def test_a_guest_that_cannot_serve_names_is_ended() -> None:
    async with liar() as (guest, channel):
        channel.carry(CarriedStream.reset, lambda query, over: anyio.lowlevel.checkpoint(), None)  # type: ignore[arg-type]
        await guest.hear()
        await guest.say(frame(FrameType.LISTENING, NAMES, 0, U32.pack(98)))
        with anyio.fail_after(5):
            assert "Address already in use" in (await channel.wait_lost()).message


async def test_crossed_frames_are_no_lies() -> None:
    """What the guest may have sent before it heard us: bytes of a connection that we closed or reset, a connection to a
    listener that we ended, an answer to a dial that we gave up. Nor is a query that has the number of a connection."""
    async with liar() as (guest, channel), anyio.create_task_group() as tasks:
        streams = await carrying(guest, channel, tasks)
        await guest.say(frame(FrameType.QUERY, ONE, 0, bytes(20)))
        streams[0].reset()
        await guest.say(data(ONE), frame(FrameType.EOF, ONE), frame(FrameType.CLOSED, ONE))
        await guest.say(accepted(TWO))
        with anyio.fail_after(5):
            while len(streams) < 2:
                await anyio.lowlevel.checkpoint()
        await streams[1].aclose()
        await guest.say(data(TWO, bytes(9999)), frame(FrameType.CLOSED, TWO))
        tasks.start_soon(channel.unlisten, *WEB)
        await anyio.wait_all_tasks_blocked()
        await guest.say(accepted(NEW), frame(FrameType.UNLISTENED, LISTENER), frame(FrameType.RESET, NEW, 0, OK))
        with anyio.move_on_after(0.01):
            await channel.connect(9000)
        await guest.say(connected(5, NEW), frame(FrameType.CLOSED, NEW))
        await anyio.sleep(0.05)
        assert channel.lost is None
        assert channel._streams == {}
        assert len(streams) == 3
        channel.close()


async def test_a_flood_of_tiny_frames_lets_others_have_their_turn() -> None:
    turns = 0

    def tick() -> None:
        nonlocal turns
        turns += 1
        if streams[0].received < 15_000:
            asyncio.get_running_loop().call_soon(tick)

    async with liar() as (guest, channel), anyio.create_task_group() as tasks:
        streams = await carrying(guest, channel, tasks)
        flood = data(ONE) * 15_000
        tasks.start_soon(guest.say, flood)
        tick()
        with anyio.fail_after(10):
            while streams[0].received < 15_000:
                await streams[0].receive()
        assert turns >= 15_000 / 256
        channel.close()


def _random_frame(rng: random.Random) -> bytes:
    kind = rng.choice([*range(16, 26), FrameType.DATA, FrameType.EOF, FrameType.CREDIT, FrameType.CLOSED])
    number = rng.choice([0, 1, 2, 3, 4, 5, ONE, TWO, NEW, QUERY])
    payload = rng.choice(
        [b"", OK, bytes(12), bytes(20), rng.randbytes(rng.randint(0, 300)), accepted(ONE)[12:], connected(4, NEW)[12:]]
    )
    raw = bytearray(frame(kind, number, rng.choice([0, 0, 0, 1]), payload))  # type: ignore[arg-type]
    if rng.random() < 0.1:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


@pytest.mark.parametrize("seed", range(60))
async def test_random_frames_end_in_streams_or_in_one_known_error(seed: int) -> None:
    rng = random.Random(seed)
    refused: list[Refusals] = []

    async def dns(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        return query

    async def use(stream: CarriedStream) -> None:
        with contextlib.suppress(OSError):
            await stream.send(bytes(70_000))
            while await stream.receive(rng.randint(1, 999)):
                pass
        await stream.aclose()

    async with liar() as (guest, channel), anyio.create_task_group() as tasks:

        async def call(number: int) -> None:
            with contextlib.suppress(ProctorError, InfraError):
                if number == 0:
                    await channel.listen(*WEB)
                else:
                    await use(await channel.connect(80, timeout_s=0.5))

        channel.carry(lambda stream: tasks.start_soon(use, stream), dns, refused.append)
        for number in range(2):
            tasks.start_soon(call, number)
        await guest.hear(3 * 18)
        truth = [frame(FrameType.LISTENING, number, 0, OK) for number in (1, 2, 3)] + [accepted(ONE)]
        await guest.say(*truth[: rng.randint(0, 4)])
        for _ in range(rng.randint(1, 40)):
            await guest.say(_random_frame(rng))
        guest.leave()
        with anyio.fail_after(5):
            await channel.wait_lost()
    assert channel._streams == {}
