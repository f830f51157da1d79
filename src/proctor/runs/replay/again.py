"""A trial done again as a trial: the same task, agent, seed and limits, through the same engine, into a record of its
own that names its parent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from proctor.common import ConfigError, new_id
from proctor.runs.engine import execute
from proctor.runs.examiner import opened
from proctor.runs.lock import make_lock, write_lock
from proctor.runs.preparation import Preparation
from proctor.runs.record import record_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from proctor.models.gateway import GatewayConfig
    from proctor.runs.engine import Execution, OnEvent
    from proctor.runs.examiner import Playback
    from proctor.runs.plan import RunPlan, TrialPlan
    from proctor.runs.replay.recorded import Recorded


def plan_of(
    recorded: Recorded, trials: Sequence[TrialPlan], parent: dict[str, Any], gateway: GatewayConfig | None
) -> RunPlan:
    """A run of these trials, made from the recorded one."""
    agents = {trial.agent.label: trial.agent for trial in trials}
    return replace(
        recorded.plan,
        run_id=new_id("run"),
        agents=tuple(agents.values()),
        attempts=max(trial.attempt for trial in trials),
        conditions=(recorded.trial.condition,),
        options={},
        gateway=gateway,
        parent={
            "run_id": recorded.result.run_id,
            "trial": recorded.result.trial_id,
            "record": recorded.digest,
            **parent,
        },
        given=tuple(trials),
    )


def replaying_gateway(recorded: Recorded, url: str) -> GatewayConfig | None:
    """The gateway of a run that had a file for it, with every model answered at `url`: no key is needed, no other
    endpoint is asked. None for a run without such a file."""
    from proctor.models.gateway import GatewayConfig, ModelConfig, UpstreamConfig

    kept = recorded.lock.options.get("gateway")
    if kept is None:
        return None
    models = {
        name: ModelConfig(name=name, upstream="replay", id=model["id"], aliases=tuple(model["aliases"]))
        for name, model in kept["config"]["models"].items()
    }
    return GatewayConfig(upstreams={"replay": UpstreamConfig("replay", url)}, models=models)


def branching_gateway(recorded: Recorded, url: str) -> tuple[GatewayConfig, str] | None:
    """The same gateway with the endpoint of the trial's model at `url`, and where that endpoint is in truth.

    Raises ConfigError when its file, or a key, is not as it was. None for a run without such a file.
    """
    from proctor.runs.gateways import gateway_again

    _, config = gateway_again(recorded.lock.options)
    model = recorded.trial.agent.model
    if config is None or model is None:
        return None
    upstream = config.upstreams[config.models[model.name].upstream]
    upstreams = {**config.upstreams, upstream.name: replace(upstream, base_url=url)}
    return replace(config, upstreams=upstreams), upstream.base_url


async def carry_out(
    recorded: Recorded, plan: RunPlan, directory: Path, playback: Playback, on_event: OnEvent = lambda event: None
) -> Execution:
    """Run the plan, one trial after the other, into `directory`, which has to be empty or absent."""
    kits = {agent.label: recorded.kit for agent in plan.agents if recorded.kit.layers}
    preparation = Preparation({recorded.trial.task.name: recorded.image}, kits=kits)
    await to_thread.run_sync(_write_lock, directory, plan, preparation)
    async with opened(plan, preparation, playback) as examiner:
        return await execute(plan, directory, examiner, concurrency=1, on_event=on_event)


def _write_lock(directory: Path, plan: RunPlan, preparation: Preparation) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError("not an empty directory", field=str(directory), remedy="choose another one with -o")
    with record_errors(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        write_lock(directory, make_lock(plan, preparation.images, preparation.kit_digests))
