"""A run's way to its models: one gateway for all its trials, and for each trial a token, a client and an address.

Harnesses in this process and programs in a sandbox are served by the same gateway, so there is one accounting.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from proctor.agents.contract import ModelEndpoint
from proctor.common import ConfigError
from proctor.models.contract import ModelSpec
from proctor.models.gateway import Budgets, GatewayConfig, config_of
from proctor.models.spec import load_model
from proctor.sandbox.net import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from proctor.agents.contract import Harness
    from proctor.models.client import OpenAIChatClient
    from proctor.models.gateway import Gateway, TrialAccess
    from proctor.runs.plan import AgentSpec, RunPlan, TrialPlan
    from proctor.runs.record import TrialRecord
    from proctor.tasks.model import AgentLimits

HOST = "model.proctor"
"""The name that stands for the gateway inside a sandbox, on port 80."""
_USER = "/user"
"""Ends the name under which a trial's simulated user has access to a model."""


@dataclass(frozen=True, slots=True)
class TrialModels:
    """What one trial has of its model: a client for a harness out here, an endpoint for a program in the sandbox."""

    access: TrialAccess
    client: OpenAIChatClient
    endpoint: ModelEndpoint
    user: OpenAIChatClient | None = None
    """Who plays the simulated user of the task, where a model does. Its calls are on record apart from the agent's."""


class ModelDesk:
    """Hands out access to the models of a run. `names` are the gateway's names of the agents' models, by label."""

    def __init__(self, gateway: Gateway, names: Mapping[str, str]) -> None:
        self.gateway = gateway
        self._app = gateway.app
        self._names = names

    def services(self, trial: TrialPlan, harness: Harness) -> dict[str, Service]:
        """What answers names in the trial's sandbox: the gateway, where the agent is a program in there that has a
        model. A harness says so by `protocols` (see `InstalledHarness`)."""
        if trial.agent.model is None or not getattr(harness, "protocols", ()):
            return {}
        return {HOST: Service.asgi(self._app)}

    @asynccontextmanager
    async def opened(
        self, trial: TrialPlan, limits: AgentLimits, record: TrialRecord, *, calls: int | None = None
    ) -> AsyncIterator[TrialModels | None]:
        """Access while the body runs; None for an agent without a model. Afterwards every call is on record.

        `calls` bounds the calls: for an agent that runs in the sandbox, they are its steps.
        """
        from proctor.models.client import OpenAIChatClient
        from proctor.models.gateway import GatewayTransport

        model = trial.agent.model
        if model is None:
            yield None
            return
        name = self._names[trial.agent.label]
        budgets = Budgets(tokens=limits.tokens, cost_usd=limits.cost_usd, calls=calls)
        access = self.gateway.open_trial(trial.id, models=[name], budgets=budgets, record=record.model_call)
        record.hide(access.token)
        client = OpenAIChatClient(model, transport=GatewayTransport(self.gateway, access))
        protocols = self.gateway.config.upstreams[self.gateway.config.models[name].upstream].protocols
        endpoint = ModelEndpoint(f"http://{HOST}", access.token, name, protocols)
        try:
            async with self._user(trial, record) as user:
                yield TrialModels(access, client, endpoint, user)
            with anyio.CancelScope(shield=True):
                await access.finish(self.gateway.config.drain_s)
        finally:
            access.close()
            with anyio.CancelScope(shield=True):
                await client.aclose()
        if access.failure is not None:
            raise access.failure

    @asynccontextmanager
    async def _user(self, trial: TrialPlan, record: TrialRecord) -> AsyncIterator[OpenAIChatClient | None]:
        """The model that plays the simulated user, with access of its own; None where the agent's options name none."""
        from proctor.models.client import OpenAIChatClient
        from proctor.models.gateway import GatewayTransport

        name = self._names.get(f"{trial.agent.label}{_USER}")
        if name is None:
            yield None
            return
        model = self.gateway.config.models[name]
        spec = ModelSpec(name, self.gateway.config.upstreams[model.upstream].base_url)
        access = self.gateway.open_trial(
            f"{trial.id}{_USER}", models=[name], budgets=Budgets(), record=record.user_call
        )
        client = OpenAIChatClient(spec, transport=GatewayTransport(self.gateway, access))
        try:
            yield client
            with anyio.CancelScope(shield=True):
                await access.finish(self.gateway.config.drain_s)
        finally:
            access.close()
            with anyio.CancelScope(shield=True):
                await client.aclose()


def gateway_of(plan: RunPlan) -> tuple[GatewayConfig, dict[str, str]]:
    """The gateway's configuration for a plan, and the name of each agent's model in it.

    Without a file, every `--model` stands for a gateway of one model. Raises ConfigError when a key is missing.
    """
    agents = [agent for agent in plan.agents if agent.model is not None]
    if plan.gateway is not None:
        config = plan.gateway
        for agent in agents:
            config = _aimed(config, agent)
        names = {agent.label: agent.model.name for agent in agents if agent.model is not None}
        return config, names | _configured_users(config, agents)
    wanted = {agent.label: agent.model for agent in agents if agent.model is not None}
    for agent in agents:
        if (text := _user_model(agent)) is not None:
            wanted[f"{agent.label}{_USER}"] = load_model(text)
    specs, names = _named(wanted)
    return config_of(specs), names


def _user_model(agent: AgentSpec) -> str | None:
    """What the agent's options name as the player of a simulated user."""
    text = agent.options.get("user_model")
    return text if isinstance(text, str) else None


def _configured_users(config: GatewayConfig, agents: list[AgentSpec]) -> dict[str, str]:
    """With a gateway's file, a user is one of its models, by name."""
    names = {f"{agent.label}{_USER}": text for agent in agents if (text := _user_model(agent)) is not None}
    for name in names.values():
        if name not in config.models:
            raise ConfigError(f"the gateway has no model {name!r}", field="--option user_model",
                              remedy=f"one of {', '.join(config.models)}")  # fmt: skip
    return names


def _aimed(config: GatewayConfig, agent: AgentSpec) -> GatewayConfig:
    """The configuration with the agent's model at the agent's own address: a replay puts recorded answers in place of
    the upstream. Nothing of the model's may then reach the upstream, its key and its fallbacks included."""
    assert agent.model is not None
    model = config.models[agent.model.name]
    upstream = config.upstreams[model.upstream]
    if upstream.base_url == agent.model.base_url:
        return config
    name = f"{model.upstream}@{agent.label}"
    aimed = replace(
        upstream, name=name, base_url=agent.model.base_url, key=None, key_source="", headers={}, health=None
    )
    return replace(
        config,
        upstreams={**config.upstreams, name: aimed},
        models={**config.models, model.name: replace(model, upstream=name, fallback=())},
    )


def _named(wanted: Mapping[str, ModelSpec]) -> tuple[dict[str, ModelSpec], dict[str, str]]:
    """Models, by who wants them, under names of their own; equal models are one."""
    specs: dict[str, ModelSpec] = {}
    names: dict[str, str] = {}
    for who, model in wanted.items():
        name, number = model.name, 1
        while specs.setdefault(name, model) != model:
            number += 1
            name = f"{model.name}#{number}"
        names[who] = name
    return specs, names
