"""The carried network's transport: connections and name queries of a real sandbox, as the host sees them."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Literal

import anyio
import pytest

from proctor.sandbox import Edge, SandboxSpec
from proctor.sandbox._names import NameLayers
from proctor.sandbox.native.carried import AddressError, CarriedStream, StreamReset
from proctor.sandbox.net import NetworkPolicy, Rule

from .carrying import DIAL, HARD_CLOSE, MEET_RESET, WEB, echo, serving

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeRoom

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


async def test_bytes_go_both_ways_whole_and_in_order(make_room: MakeRoom) -> None:
    program = DIAL + (
        "import hashlib, threading, os\ndata = os.urandom(5_000_000)\n"
        "threading.Thread(target=lambda: (s.sendall(data), s.shutdown(socket.SHUT_WR))).start()\n"
        "back = b''.join(iter(lambda: s.recv(70_000), b''))\n"
        "print(s.getsockname()[1], hashlib.sha256(data).hexdigest(), back == data)"
    )
    async with make_room() as room, serving(room, echo) as streams:
        result = await room.python(program)
        assert result.error_text == ""
        port, _, same = result.text.split()
        assert same == "True"
        (stream,) = streams
        assert (stream.local, stream.peer) == (WEB, ("127.0.0.1", int(port)))
        assert stream.received == stream.sent == 5_000_000


async def test_names_are_asked_raw_over_udp_and_tcp(make_room: MakeRoom) -> None:
    asked: list[tuple[bytes, str]] = []

    async def dns(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        asked.append((query, over))
        return query[:2] + b"\x81\x80" + bytes(8) + b"answer"

    program = (
        "import socket\nq = b'\\x12\\x34' + bytes(10) + b'question'\n"
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nu.settimeout(5)\nu.sendto(q, ('127.0.0.53', 53))\n"
        "print(u.recv(999)[-6:])\n"
        "t = socket.create_connection(('127.0.0.53', 53), 5)\nt.sendall(len(q).to_bytes(2, 'big') + q)\n"
        "print(t.recv(999)[-6:])"
    )
    async with make_room() as room:
        room.channel.carry(CarriedStream.reset, dns)
        result = await room.python(program)
        assert result.text == "b'answer'\n" * 2, result.error_text
    assert asked == [(b"\x12\x34" + bytes(10) + b"question", over) for over in ("udp", "tcp")]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_server_inside_is_reached(make_room: MakeRoom, host: str) -> None:
    server = (
        f"import socket\nfamily = socket.AF_INET6 if ':' in '{host}' else socket.AF_INET\n"
        f"s = socket.create_server(('{host}', 8000), family=family)\nprint('up', flush=True)\nc, _ = s.accept()\n"
        "c.sendall(c.recv(99).upper())\nc.close()"
    )
    async with make_room() as room:
        process = await room.channel.start(["/usr/bin/python3", "-c", server], env={})
        async for _, data in process.output():
            assert data == b"up\n"
            break
        stream = await room.channel.connect(8000)
        await stream.send(b"hello")
        assert await stream.receive() == b"HELLO"
        assert await stream.receive() == b""
        await stream.aclose()
        assert (await process.wait()).exit_code == 0
        with pytest.raises(AddressError) as caught:
            await room.channel.connect(8000)
        assert caught.value.errno == errno.ECONNREFUSED


async def test_resets_go_both_ways(make_room: MakeRoom) -> None:
    was_reset = anyio.Event()

    async def handler(stream: CarriedStream) -> None:
        try:
            while await stream.receive():
                pass
        except StreamReset:
            was_reset.set()

    hard = DIAL + "s.sendall(b'x')\n" + HARD_CLOSE
    async with make_room() as room:
        async with serving(room, handler):
            assert (await room.python(hard)).exit_code == 0
            with anyio.fail_after(5):
                await was_reset.wait()

        async def refuse(stream: CarriedStream) -> None:
            stream.reset()

        async with serving(room, refuse):
            result = await room.python(MEET_RESET)
            assert result.text == "reset\n"


def _answer(query: bytes, address: str) -> bytes:
    """A (any name): `address`; anything else: no data."""
    end = query.index(b"\0", 12) + 5
    is_a = query[end - 4 : end - 2] == b"\0\1"
    record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + bytes(map(int, address.split(".")))
    head = query[:2] + b"\x81\x80\0\1" + (b"\0\1" if is_a else b"\0\0") + bytes(4)
    return head + query[12:end] + (record if is_a else b"")


@pytest.mark.parametrize("image", ["bare", "link"])
async def test_programs_look_names_up(make_room: MakeRoom, base_layer: Path, tmp_path: Path, image: str) -> None:
    """Whatever the image has for /etc/resolv.conf: nothing, or a link that leads nowhere."""
    layers: tuple[Path, ...] = (base_layer,)
    if image == "link":
        (tmp_path / "layer/etc").mkdir(parents=True)
        (tmp_path / "layer/etc/resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")
        layers = (base_layer, tmp_path / "layer")
    stack = NameLayers(tmp_path / "home").around(layers, len(layers))

    async def dns(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        assert over == "udp"
        return _answer(query, WEB[0])

    program = "import socket\nprint(socket.getaddrinfo('somewhere.example', 80, type=socket.SOCK_STREAM))"
    async with make_room(layers=stack, network="carried") as room:
        room.channel.carry(CarriedStream.reset, dns)
        result = await room.python(program)
        assert WEB[0] in result.text, result.error_text
        assert (await room.python("import socket; print(socket.gethostbyname('localhost'))")).text == "127.0.0.1\n"
        assert (await room.sh("echo nameserver 127.0.0.9 > /etc/resolv.conf; cat /etc/resolv.conf")).exit_code == 0
        upper = await room.sh("ls -l /etc/resolv.conf")
        assert upper.text.startswith("-rw-r--r--"), upper.error_text


async def test_a_diff_shows_nothing_of_ours_and_a_change_of_the_file_stays(tmp_path: Path) -> None:
    spec = SandboxSpec(network=NetworkPolicy("allow", (Rule("example.org"),)))
    async with Edge(tmp_path, pool_size=1) as edge, await edge.create(spec) as box:
        assert (await box.exec("cat /etc/resolv.conf")).text == "nameserver 127.0.0.53\n"
        assert [entry.path for entry in await box.diff() if "etc" in entry.path] == []
        await box.exec("echo '# mine' >> /etc/resolv.conf")
        assert "/etc/resolv.conf" in [entry.path for entry in await box.diff()]
        (fork,) = await box.fork(1)
        async with fork:
            assert (await fork.exec("cat /etc/resolv.conf")).text == "nameserver 127.0.0.53\n# mine\n"
        await box.reset()
        assert (await box.exec("cat /etc/resolv.conf")).text == "nameserver 127.0.0.53\n"
