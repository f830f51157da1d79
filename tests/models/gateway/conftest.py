"""A gateway over real HTTP before a scripted upstream, with one trial open."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import httpx
import pytest

from proctor.models.gateway import Budgets, CallRecord, Gateway, GatewayConfig, ModelConfig, TrialAccess, UpstreamConfig
from proctor.models.gateway.config import Retries
from proctor.models.scripted import Script, ScriptedServer
from proctor.models.serving import serving

KEY = "sk-real-" + "k3y/" * 8
"""The upstream's key. No record, sandbox or answer may ever hold it."""


def make_config(base_url: str, **model: Any) -> GatewayConfig:
    """One upstream, one model `m`."""
    upstream = UpstreamConfig("up", base_url, key=KEY, key_source="$KEY", retries=Retries(base_s=0.01))
    return GatewayConfig({"up": upstream}, {"m": ModelConfig("m", "up", model.pop("id", "m-1"), **model)})


@dataclass
class Desk:
    """What a test works with."""

    gateway: Gateway
    access: TrialAccess
    upstream: ScriptedServer
    url: str
    calls: list[CallRecord]
    waits: list[float]
    http: httpx.AsyncClient = field(repr=False)

    def post(self, path: str, body: Any, **more: Any) -> Any:
        """A request with the trial's token."""
        headers = {"authorization": f"Bearer {self.access.token}", **more.pop("headers", {})}
        return self.http.post(f"{self.url}/{path}", json=body, headers=headers, **more)

    def chat(self, text: str = "hello", **more: Any) -> Any:
        """A chat completion."""
        return self.post("chat/completions", {"model": "m", "messages": [{"role": "user", "content": text}], **more})


Opener = Callable[..., contextlib.AbstractAsyncContextManager[Desk]]


@contextlib.asynccontextmanager
async def open_desk(
    script: Script,
    *,
    budgets: Budgets | None = None,
    config: Callable[[GatewayConfig], GatewayConfig] = lambda config: config,
    real_sleep: bool = False,
    **model: Any,
) -> AsyncIterator[Desk]:
    """A scripted upstream, a gateway on loopback and one trial. Waits between tries are noted, not waited."""
    calls: list[CallRecord] = []
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await anyio.sleep(seconds if real_sleep else 0)

    async with ScriptedServer(script) as upstream:
        whole = config(make_config(upstream.base_url, **model))
        async with Gateway(whole, rng=random.Random(7), sleep=sleep) as gateway, serving(gateway.app) as address:
            access = gateway.open_trial("t1", models=["m"], record=calls.append, budgets=budgets)
            url = f"http://{address[0]}:{address[1]}/v1"
            async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
                yield Desk(gateway, access, upstream, url, calls, waits, http)


def with_upstream(**changes: Any) -> Callable[[GatewayConfig], GatewayConfig]:
    """A change of the one upstream."""

    def change(config: GatewayConfig) -> GatewayConfig:
        return replace(config, upstreams={"up": replace(config.upstreams["up"], **changes)})

    return change


@pytest.fixture
def dead_url() -> str:
    """A loopback address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
