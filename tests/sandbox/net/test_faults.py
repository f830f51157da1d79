"""Faults on purpose: drawn from the seed, felt by the program, on record."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.sandbox.net import Fault, FaultProfile, NetworkPolicy, Rule, Service
from proctor.sandbox.net.faults import FaultPlayer

from .inside import drain, inside, server, web

pytestmark = pytest.mark.anyio

_faults = st.builds(
    Fault,
    kind=st.sampled_from(["delay", "refuse", "reset", "stall", "status"]),
    host=st.sampled_from(["*", "one.test", "*.one.test"]),
    rate=st.floats(0, 1),
    ms=st.floats(1, 100),
    after_bytes=st.integers(0, 100),
)
_profiles = st.builds(FaultProfile, faults=st.lists(_faults, max_size=4).map(tuple), seed=st.integers(0, 99))


@given(_profiles, st.lists(st.sampled_from(["one.test", "a.one.test", "two.test"]), max_size=20))
def test_what_is_struck_follows_from_seed_name_and_ordinal_alone(profile: FaultProfile, visits: list[str]) -> None:
    """Whatever happens at other names in between."""
    together, alone = FaultPlayer(profile), {name: FaultPlayer(profile) for name in set(visits)}
    for name in visits:
        assert together.connection(name, 80) == alone[name].connection(name, 80)
        assert together.request(name, 80) == alone[name].request(name, 80)


@given(_profiles)
def test_documents_survive_the_way_out_and_in(profile: FaultProfile) -> None:
    again = FaultProfile.parse(json.dumps(profile.as_json()))
    assert again == profile
    assert again.digest == profile.digest


def test_rates_are_kept_in_the_long_run() -> None:
    player = FaultPlayer(FaultProfile((Fault("status", rate=0.25),), seed=3))
    hits = sum(player.request("one.test", 80).status is not None for _ in range(4000))
    assert 900 < hits < 1100


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"faults": [{"kind": "explode"}]}, "faults.faults[0].kind"),
        ({"faults": [{"kind": "delay"}]}, "faults.faults[0]"),
        ({"faults": [{"kind": "bandwidth"}]}, "faults.faults[0]"),
        ({"faults": [{"kind": "refuse", "rate": 1.5}]}, "faults.faults[0].rate"),
        ({"faults": [{"kind": "status", "status": 200}]}, "faults.faults[0].status"),
        ({"faults": [{"kind": "refuse", "host": "10.0.0.1"}]}, "faults.faults[0].host"),
        ({"faults": [], "name": "a b"}, "faults.name"),
        ({}, "faults.faults"),
    ],
)
def test_a_wrong_document_is_refused_by_the_field(document: object, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultProfile.from_json(document)
    assert caught.value.field == field


def profile(*faults: Fault) -> FaultProfile:
    return FaultProfile(faults, seed=1)


def reaching(where: str) -> NetworkPolicy:
    return NetworkPolicy("allow", (Rule("one.test", internal=True, target=where),))


async def test_a_status_instead_of_the_request() -> None:
    seen: list[bytes] = []
    faults = profile(Fault("status", status=429, retry_after_s=7))
    async with server(web(seen=seen)) as where, inside(reaching(where), faults=faults) as program:
        answer = await program.get("one.test")
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nRetry-After: 7\r\n" in answer
        request = await program.last("request")
        assert (request.status, request.fault, request.decision) == (429, "status 429", "allowed")
        assert program.boundary.needs_authority, "a status can be had inside TLS only where it ends here"
    assert seen == []


async def test_services_suffer_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the service was asked")

    faults = profile(Fault("status", host="model.proctor", status=500))
    async with inside(NetworkPolicy(), services={"model.proctor": Service.asgi(app)}, faults=faults) as program:
        assert (await program.get("model.proctor")).startswith(b"HTTP/1.1 500 ")
        assert (await program.last("request")).fault == "status 500"


async def test_refused_and_reset_and_stalled_connections() -> None:
    big = b"x" * 50_000
    async with server(web(body=big)) as where:
        async with inside(reaching(where), faults=profile(Fault("refuse"))) as program:
            pipe = await program.dial("one.test")
            assert await drain(pipe) == b""
            event = await program.last()
            assert (event.fault, event.reason, event.sent) == ("refuse", "fault", 0)
        async with inside(reaching(where), faults=profile(Fault("reset", after_bytes=1000))) as program:
            assert len(await program.get("one.test")) == 1000
            assert (await program.last()).fault == "reset after 1000"
        async with inside(reaching(where), faults=profile(Fault("stall", after_bytes=1000))) as program:
            pipe = await program.dial("one.test")
            await pipe.send(b"GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
            data = b""
            with anyio.move_on_after(0.3) as waited:
                while True:
                    data += await pipe.receive()
            assert waited.cancelled_caught
            assert len(data) == 1000
            await pipe.aclose()


async def test_delay_and_bandwidth_take_their_time() -> None:
    """Lower bounds only: a busy machine is slower, never faster."""
    body = b"x" * 20_000
    async with server(web(body=body)) as where:
        faults = profile(Fault("delay", ms=100), Fault("bandwidth", kb_per_s=100))
        async with inside(reaching(where), faults=faults) as program:
            began = anyio.current_time()
            assert (await program.get("one.test")).endswith(body)
            assert anyio.current_time() - began > 0.1 + 0.1 + 0.15
            assert (await program.last()).fault == "delay 100 ms, bandwidth 100 kB/s"
