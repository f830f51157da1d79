"""The blocking face: the same behaviour, errors and ends as the async one."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

import proctor.sandbox
from proctor.sandbox import EndReason, FileError, SandboxLost, contract, sync
from proctor.sandbox.net import NetworkPolicy, Rule

from .edges import gauges, small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[sync.Edge]:
    with sync.Edge(home=tmp_path, pool_size=1) as edge:
        yield edge


@pytest.mark.sandbox
def test_a_script_can_use_a_sandbox(edge: sync.Edge) -> None:
    with edge.create(small()) as box:
        box.write("/root/in", b"banana\n")
        assert box.exec("tr a b < /root/in").text == "bbnbnb\n"
        assert [entry.path for entry in box.diff()] == ["/root/in"]
        (child,) = box.fork()
        box.reset()
        assert child.read("/root/in") == b"banana\n"
        with pytest.raises(FileError):
            box.read("/root/in")
        assert child.close().end_reason is EndReason.CLOSED
    with pytest.raises(SandboxLost):
        box.exec("true")


@pytest.mark.sandbox
def test_a_process_is_read_as_it_goes(edge: sync.Edge) -> None:
    with edge.create(small()) as box:
        process = box.start("cat")
        process.write_stdin(b"one")
        chunks = process.output()
        assert next(chunks) == ("stdout", b"one")
        process.close_stdin()
        assert list(chunks) == []
        assert process.wait().exit_code == 0


@pytest.mark.sandbox
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = gauges(tmp_path)
    with sync.Edge(home=tmp_path, pool_size=1) as edge:
        edge.create(small()).exec("sleep 1000 &", keep=True)
    assert gauges(tmp_path) == before


@pytest.mark.sandbox
def test_an_error_in_the_body_comes_out_as_it_is(tmp_path: Path) -> None:
    def body() -> None:
        with sync.Edge(home=tmp_path, pool_size=1) as edge, edge.create(small()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()


def methods(kind: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(member).parameters)
        for name, member in vars(kind).items()
        if not name.startswith("_") and callable(member)
    }


@pytest.mark.parametrize(("blocking", "agreed"), [(sync.Sandbox, contract.Sandbox), (sync.Process, contract.Process)])
def test_both_faces_have_the_same_methods_and_parameters(blocking: type, agreed: type) -> None:
    assert methods(blocking) == methods(agreed)


def test_the_package_exports_what_it_names() -> None:
    for name in proctor.sandbox.__all__:
        assert getattr(proctor.sandbox, name) is not None
    with pytest.raises(AttributeError):
        _ = proctor.sandbox.nonsense


@pytest.mark.sandbox
def test_a_script_can_change_the_network_and_reach_a_server_inside(edge: sync.Edge) -> None:
    with edge.create(small(network=NetworkPolicy())) as box:
        assert box.set_network(NetworkPolicy("allow", (Rule("one.test"),)), expect=1) == 2
        assert box.network[0].summary == "allow"
        box.exec("curl -sS -m 1 http://two.test/", timeout_s=20)
        assert any(event.reason == "unlisted" for event in box.network_events)
        serve = (
            "python3 -c \"import socket; s = socket.create_server(('127.0.0.1', 80)); s.accept()[0].sendall(b'hello')\""
        )
        box.start(serve, keep=True)
        assert box.exec("until grep -q ':0050 ' /proc/net/tcp; do sleep 0.05; done", timeout_s=20).ok
        with box.connect(80) as connected:
            assert connected.makefile("rb").read() == b"hello"
