"""The carried network against programs and hosts without manners: every bound is met, nothing is left."""

from __future__ import annotations

import errno
import os
import random
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox.contract import SandboxError, SandboxLost
from proctor.sandbox.native.carried import (
    CONNECTIONS_MAX,
    LISTENERS_MAX,
    QUERIES_MAX,
    WIDE_MAX,
    AddressError,
    CarriedStream,
    Refusals,
    StreamReset,
)
from proctor.sandbox.native.frames import FIRST_WINDOW, WINDOW

from .carrying import DIAL, HARD_CLOSE, MEET_RESET, WEB, all_over, echo, no_names, serving

if TYPE_CHECKING:
    from typing import Literal

    from .conftest import MakeRoom, Room

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


async def idle(stream: CarriedStream) -> None:
    """Neither read nor write."""
    await anyio.sleep_forever()


async def started(room: Room, program: str, word: bytes = b"up\n") -> None:
    """Start a program and wait until it has said `word`; it runs on."""
    process = await room.channel.start(["/usr/bin/python3", "-uc", program], env={})
    said = b""
    async for _, data in process.output():
        said += data
        if said.endswith(word):
            return
    raise AssertionError(f"the program ended: {await process.wait()}")


# -- listeners -------------------------------------------------------------------------------------------------------


async def test_a_port_that_a_program_has_is_reported_and_can_be_had_later(make_room: MakeRoom) -> None:
    async with make_room() as room:
        room.channel.carry(CarriedStream.reset, no_names)
        await started(room, "import socket\ns = socket.create_server(('0.0.0.0', 80))\nprint('up')\ns.accept()")
        with pytest.raises(AddressError, match="Address already in use") as caught:
            await room.channel.listen(*WEB)
        assert caught.value.errno == errno.EADDRINUSE
        await room.channel.kill_all()
        await room.channel.listen(*WEB)
        with pytest.raises(AddressError):
            await room.channel.listen(*WEB)


async def test_a_program_keeps_its_own_loopback_beside_our_listeners(make_room: MakeRoom) -> None:
    """But not every address at once: the kernel gives a port to one owner."""
    serve = "import socket\nfor host in ('127.0.0.1', '0.0.0.0'):\n  s = socket.socket()\n"
    serve += "  try: s.bind((host, 80)); s.listen(); print('mine')\n  except OSError as error: print(error.errno)"
    async with make_room() as room:
        room.channel.carry(CarriedStream.reset, no_names)
        await room.channel.listen(*WEB)
        assert (await room.python(serve)).text == f"mine\n{errno.EADDRINUSE}\n"


async def test_nobody_listens_where_nobody_was_asked_to(make_room: MakeRoom) -> None:
    tried = "for p in (53, 80, 443):\n  try: socket.create_connection(('127.7.0.1', p), 5); print('open')\n"
    # A reset that comes before connect() has returned is one of a connection that was made.
    tried += "  except ConnectionResetError: print('open')\n"
    tried = "import socket\n" + tried + "  except ConnectionRefusedError: print('refused')"
    async with make_room() as room:
        room.channel.carry(CarriedStream.reset, no_names)
        assert (await room.python(tried)).text == "refused\n" * 3
        await room.channel.listen(*WEB)
        assert (await room.python(tried)).text == "refused\nopen\nrefused\n"
        await room.channel.unlisten(*WEB)
        await room.channel.unlisten(*WEB)
        assert (await room.python(tried)).text == "refused\n" * 3


@pytest.mark.parametrize(
    ("address", "port"), [("10.0.0.1", 80), ("localhost", 80), ("::1", 80), ("127.0.0.1", 0), ("127.0.0.1", 65_536)]
)
async def test_only_ports_of_the_loopback_are_listened_on_and_dialled(
    make_room: MakeRoom, address: str, port: int
) -> None:
    async with make_room() as room:
        with pytest.raises(SandboxError, match="carry"):
            await room.channel.listen(*WEB)
        room.channel.carry(CarriedStream.reset, no_names)
        with pytest.raises(SandboxError):
            await room.channel.listen(address, port)
        with pytest.raises(SandboxError):
            await room.channel.connect(port, address)
        with pytest.raises(AddressError):
            await room.channel.listen("127.0.0.53", 53)
        await room.channel.ping()


async def test_as_many_listeners_as_there_is_room_for(make_room: MakeRoom) -> None:
    async with make_room() as room, anyio.create_task_group() as tasks:
        room.channel.carry(CarriedStream.reset, no_names)
        for number in range(LISTENERS_MAX - 2):
            tasks.start_soon(room.channel.listen, f"127.8.{number >> 8}.{number & 255}", 443)
        await anyio.wait_all_tasks_blocked()
        await room.channel.ping()
        with pytest.raises(AddressError) as caught:
            await room.channel.listen(*WEB)
        assert caught.value.errno == errno.ENFILE
        await room.channel.unlisten("127.8.0.7", 443)
        await room.channel.listen(*WEB)


# -- connections -----------------------------------------------------------------------------------------------------


async def test_more_connections_than_places_wait_their_turn(make_room: MakeRoom) -> None:
    more = CONNECTIONS_MAX + 90
    program = (
        "import socket\n"
        f"all = [socket.create_connection(('127.7.0.1', 80), 20) for _ in range({more})]\n"
        "for s in all: s.sendall(b'x'); s.shutdown(socket.SHUT_WR)\n"
        "print(sum(s.recv(9) == b'x' for s in all))"
    )
    most = 0

    async def count(stream: CarriedStream) -> None:
        nonlocal most
        most = max(most, len(room.channel._streams))
        await echo(stream)

    async with make_room() as room, serving(room, count) as streams:
        assert (await room.python(program)).text == f"{more}\n"
        assert len(streams) == more
        assert most == CONNECTIONS_MAX
        await all_over(room)


async def test_a_storm_of_dials_reaches_the_host_at_a_bounded_rate(make_room: MakeRoom) -> None:
    """2,000 a second after the first 1,024; all are served. A bound from below: no machine is too slow for it."""
    dials = "import socket\nfor _ in range(3000): socket.create_connection(('127.7.0.1', 80), 20).close()"
    times: list[float] = []

    async def note(stream: CarriedStream) -> None:
        times.append(time.monotonic())
        await stream.aclose()

    async with make_room() as room, serving(room, note):
        assert (await room.python(dials)).error_text == ""
        await all_over(room)
        with anyio.fail_after(10):
            while len(times) < 3000:
                await room.channel.ping()
    assert times[-1] - times[0] > (3000 - 1024) / 2000 * 0.9


async def test_who_does_not_read_stops_the_other(make_room: MakeRoom) -> None:
    """In either direction, after one window and what sockets hold; neither side's memory grows."""
    stuck = anyio.Event()

    async def pour(stream: CarriedStream) -> None:
        with anyio.move_on_after(0.5):
            while True:
                await stream.send(bytes(65_536))
        stuck.set()
        await anyio.sleep_forever()

    async with make_room() as room:
        async with serving(room, idle) as streams:
            await room.python(DIAL + "s.settimeout(0.5)\ntry: s.sendall(bytes(99_000_000))\nexcept TimeoutError: pass")
            assert streams[0].received == FIRST_WINDOW
        async with serving(room, pour) as streams:
            await started(room, DIAL + "print('up')\ntime.sleep(99)")
            with anyio.fail_after(10):
                await stuck.wait()
            assert WINDOW < streams[0].sent < 16 << 20
            assert room.channel._unsent_bytes == 0
            await room.channel.kill_all()
            await all_over(room)


async def test_what_waits_in_our_memory_is_bounded_for_all_connections_together(make_room: MakeRoom) -> None:
    program = (
        "import socket, select\nall = []\nfor _ in range(200):\n  s = socket.create_connection(('127.7.0.1', 80), 20)\n"
        "  s.setblocking(False); all.append(s)\nprint('up')\n"
        "while True:\n  for s in select.select([], all, [])[1]: s.send(bytes(65536))"
    )

    async def sip(stream: CarriedStream) -> None:
        while stream.received <= FIRST_WINDOW:
            await stream.receive()
        await anyio.sleep_forever()

    def held(stream: CarriedStream) -> int:
        return sum(map(len, stream._chunks))

    async with make_room() as room, serving(room, sip) as streams:
        await started(room, program)
        with anyio.fail_after(20):
            while sum(map(held, streams)) < 200 * FIRST_WINDOW:
                await room.channel.ping()
        assert room.channel._wide == WIDE_MAX
        await anyio.sleep(0.2)
        assert sum(map(held, streams)) <= 200 * FIRST_WINDOW + WIDE_MAX * (WINDOW - FIRST_WINDOW)
        for stream in streams:
            stream.reset()
        await all_over(room)
        assert room.channel._wide == 0


async def test_a_closed_connection_delivers_what_was_sent_and_takes_nothing_more(make_room: MakeRoom) -> None:
    async def say_much(stream: CarriedStream) -> None:
        await stream.receive()
        await stream.send(bytes(3_000_000))
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(OSError, match="closed"):
            await stream.send(b"x")
        assert await stream.receive() == b""

    reader = DIAL + (
        "s.sendall(b'x'); time.sleep(0.2)\ngot = 0\nwhile data := s.recv(99_999): got += len(data)\nprint(got)\n"
        "try:\n  while True: s.sendall(bytes(9)); time.sleep(0.01)\nexcept OSError as error: print(error.errno)"
    )
    async with make_room() as room, serving(room, say_much):
        result = await room.python(reader)
        lines = result.text.split()
        assert lines[0] == "3000000", result.error_text
        assert int(lines[1]) in (errno.EPIPE, errno.ECONNRESET)
        await all_over(room)


async def test_half_closed_in_either_order(make_room: MakeRoom) -> None:
    async def first(stream: CarriedStream) -> None:
        await stream.send_eof()
        await stream.send_eof()
        received = b""
        while data := await stream.receive(1):
            received += data
        assert received == b"abc"
        await stream.aclose()

    async with make_room() as room, serving(room, first):
        result = await room.python(DIAL + "print(s.recv(9))\ns.sendall(b'abc')\ns.close()")
        assert result.text == "b''\n"
        await all_over(room)


async def test_a_reset_comes_after_the_bytes_before_it(make_room: MakeRoom) -> None:
    outcome: list[object] = []

    async def late(stream: CarriedStream) -> None:
        await anyio.sleep(0.2)
        outcome.append(await stream.receive())
        try:
            await stream.receive()
        except StreamReset as error:
            outcome.append(error.errno)
        outcome.append("end")

    async with make_room() as room, serving(room, late):
        await room.python(DIAL + "s.sendall(b'last words')\n" + HARD_CLOSE)
        await all_over(room)
        with anyio.fail_after(5):
            while "end" not in outcome:
                await room.channel.ping()
    assert outcome == [b"last words", errno.ECONNRESET, "end"]


async def test_a_handler_that_fails_costs_its_connection_alone(
    make_room: MakeRoom, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(stream: CarriedStream) -> None:
        raise ValueError("a bug of the host")

    async def fail_names(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        raise ValueError("another")

    ask = "import socket\nu = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nu.sendto(bytes(20), ('127.0.0.53', 53))"
    async with make_room() as room:
        room.channel.carry(fail, fail_names)
        await room.channel.listen(*WEB)
        result = await room.python(MEET_RESET)
        assert result.text == "reset\n"
        assert (await room.python(ask)).exit_code == 0
        with anyio.fail_after(5):
            while "another" not in caplog.text:
                await room.channel.ping()
    assert "a bug of the host" in caplog.text


async def test_a_sandbox_that_ends_takes_its_connections_along(make_room: MakeRoom) -> None:
    waiting = anyio.Event()
    outcome: list[BaseException] = []

    async def wait(stream: CarriedStream) -> None:
        waiting.set()
        try:
            await stream.receive()
        except StreamReset as error:
            outcome.append(error)

    async with make_room() as room, serving(room, wait):
        await started(room, DIAL + "print('up')\ntime.sleep(99)")
        await waiting.wait()
        room.channel.close()
        await anyio.wait_all_tasks_blocked()
        assert len(outcome) == 1
        for call in (room.channel.connect(80), room.channel.listen(*WEB), room.channel.unlisten(*WEB)):
            with pytest.raises(SandboxLost):
                await call


async def test_a_dial_that_nobody_answers_is_given_up(make_room: MakeRoom) -> None:
    full = (
        "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 9000)); s.listen(0)\n"
        "c = [socket.socket() for _ in range(3)]\nfor x in c: x.setblocking(False); x.connect_ex(('127.0.0.1', 9000))\n"
        "print('up')\nimport time; time.sleep(99)"
    )
    async with make_room() as room:
        await started(room, full)
        with pytest.raises(AddressError) as caught:
            await room.channel.connect(9000, timeout_s=0.2)
        assert caught.value.errno == errno.ETIMEDOUT
        with anyio.move_on_after(0.1):
            await room.channel.connect(9000)
        await room.channel.ping()
        assert (room.channel._dials, room.channel._streams) == ({}, {})


# -- names -----------------------------------------------------------------------------------------------------------


async def test_floods_and_monsters_among_queries_are_refused_and_counted(make_room: MakeRoom) -> None:
    asked: list[bytes] = []
    refused: list[Refusals] = []

    async def slow(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        asked.append(query)
        await anyio.sleep(0.3)
        return None

    flood = (
        "import socket\nu = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for size in (1, 11, 4097, 60_000): u.sendto(bytes(size), ('127.0.0.53', 53))\n"
        "for _ in range(20_000): u.sendto(bytes(40), ('127.0.0.53', 53))"
    )
    async with make_room() as room:
        room.channel.carry(CarriedStream.reset, slow, refused.append)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(room.python, flood)
            for _ in range(5):
                await room.channel.ping()
                assert (await room.sh("echo alive")).text == "alive\n"
        with anyio.fail_after(10):
            while not refused or room.channel._queries:
                await room.channel.ping()
        assert sum(one.malformed for one in refused) == 4
        assert sum(one.table for one in refused) > 0
        assert sum(one.rate for one in refused) > 0
        assert QUERIES_MAX <= len(asked) < 2000
        assert set(asked) == {bytes(40)}
        asked.clear()
        await anyio.sleep(0.1)
        await room.python(flood.replace("20_000", "1"))
        assert asked == [bytes(40)]


async def test_a_name_server_over_tcp_takes_one_query_after_the_other_and_no_nonsense(make_room: MakeRoom) -> None:
    async def dns(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        return query + b"!" * 60_000

    talk = (
        "import socket\ndef dial(): return socket.create_connection(('127.0.0.53', 53), 5)\n"
        "q = bytes(12)\nt = dial()\nt.sendall((b'\\0\\x0c' + q) * 3)\ngot = b''\n"
        "while len(got) < 3 * 60_014: got += t.recv(99_999)\nprint(len(got))\n"
        "for bad in (b'\\0\\0', b'\\0\\x0b' + bytes(11), b'\\xff\\xff', b'\\0\\x0cshort'):\n"
        "  t = dial(); t.sendall(bad); t.shutdown(socket.SHUT_WR)\n  print(t.recv(9))"
    )
    async with make_room() as room:
        room.channel.carry(CarriedStream.reset, dns)
        result = await room.python(talk)
        assert result.text == "180042\n" + "b''\n" * 4, result.error_text
        await all_over(room)


# -- everything at once ----------------------------------------------------------------------------------------------


async def test_traffic_starves_neither_commands_nor_pings_nor_the_other_way_round(make_room: MakeRoom) -> None:
    pour = (
        "import socket, threading\ndef one():\n  s = socket.create_connection(('127.7.0.1', 80))\n"
        "  while True: s.sendall(bytes(1 << 20))\nfor _ in range(8): threading.Thread(target=one).start()"
    )
    dials = "import socket\nwhile True: socket.create_connection(('127.7.0.1', 80), 20).close()"

    async def drink(stream: CarriedStream) -> None:
        while await stream.receive():
            pass
        await stream.aclose()

    async with make_room() as room, serving(room, drink) as streams, anyio.create_task_group() as tasks:
        for program in (pour, dials):
            tasks.start_soon(lambda program=program: room.channel.exec(["/usr/bin/python3", "-c", program], env={}))
        tasks.start_soon(lambda: room.channel.exec(["/usr/bin/yes"], env={}))
        with anyio.fail_after(30):
            while sum(stream.received for stream in streams) < 50_000_000 or len(streams) < 100:
                await room.channel.ping()
                assert (await room.sh("echo alive")).text == "alive\n"
            assert await room.channel.kill_all() == 0
        with anyio.fail_after(10):
            await all_over(room)


async def one_life(room: Room, rng: random.Random) -> None:
    """A program that dials, behaves somehow, and leaves somehow."""
    acts = ["s.sendall(bytes(300_000))", "s.recv(9)", "s.shutdown(socket.SHUT_WR)", "pass", "s.sendall(b'x')"]
    leave = rng.choice(["s.close()", HARD_CLOSE, "while s.recv(9999): pass", "time.sleep(9)"])
    timeout_s = rng.choice([0.05, 0.3, 3])
    await room.python(f"{DIAL}s.settimeout(2)\n{rng.choice(acts)}\n{leave}", timeout_s=timeout_s)


async def somehow(stream: CarriedStream) -> None:
    """A host that behaves somehow."""
    rng = random.Random(stream.peer[1])
    try:
        for _ in range(rng.randrange(4)):
            await rng.choice([lambda: stream.send(bytes(100_000)), stream.send_eof, stream.receive])()
    except OSError:
        pass
    if rng.random() < 0.5:
        stream.reset()
    await stream.aclose()


async def test_names_are_asked_while_connections_come_and_go(make_room: MakeRoom) -> None:
    """Both are numbered by the guest, from the same start."""
    program = (
        "import socket\nu = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(10)\nopen = []\n"
        "for i in range(395):\n  open.append(socket.create_connection(('127.7.0.1', 80), 20))\n"
        "  u.sendto(i.to_bytes(2, 'big') + bytes(18), ('127.0.0.53', 53))\n"
        "  assert u.recv(99)[:2] == i.to_bytes(2, 'big')\nprint('fine')"
    )

    async def dns(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        return query

    async with make_room() as room, serving(room, echo):
        room.channel._dns = dns
        assert (await room.python(program)).text == "fine\n"


@pytest.mark.slow
async def test_a_storm_leaves_nothing(make_room: MakeRoom) -> None:
    deadline = time.monotonic() + 2
    async with make_room() as room:
        async with serving(room, somehow), anyio.create_task_group() as tasks:

            async def worker(seed: int) -> None:
                rng = random.Random(seed)
                while time.monotonic() < deadline:
                    if rng.random() < 0.8:
                        await one_life(room, rng)
                    else:
                        with pytest.raises(AddressError):
                            await room.channel.connect(rng.choice([1, 9999]))

            for seed in range(6):
                tasks.start_soon(worker, seed)
        await room.channel.kill_all()
        await all_over(room)
        sockets = [
            name
            for name in os.listdir(f"/proc/{room.launched.pid}/fd")
            if os.readlink(f"/proc/{room.launched.pid}/fd/{name}").startswith("socket:")
        ]
        assert len(sockets) == 3  # the channel, and the two of the name server
