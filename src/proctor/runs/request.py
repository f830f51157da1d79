"""From what a person asks for to a plan: tasks and agents are loaded and checked before anything else happens."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from proctor.agents.contract import InstalledHarness
from proctor.agents.registry import load_harness
from proctor.common import ConfigError, RefusedError, digest_file, digest_json, digest_tree, new_id
from proctor.runs.conditions import Asked, make_conditions
from proctor.runs.gateways import check_protocols, gateway_again, gateway_models, load_gateway, locked
from proctor.runs.isolation import Isolation
from proctor.runs.lock import unlock_model
from proctor.runs.network import NetworkGrant
from proctor.runs.plan import LIMIT_NAMES, AgentSpec, RunPlan, check_unique, effective_limits
from proctor.runs.stopping import make_rule
from proctor.tasks import load_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from proctor.agents.contract import Harness
    from proctor.models.contract import ModelSpec
    from proctor.models.gateway import GatewayConfig
    from proctor.runs.formats import RunLock
    from proctor.tasks.model import Dataset

PREDICTIONS = "predictions"
"""Harness name of the agent that stands for a predictions file."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked for, as text; the fields are the options of `proctor run`."""

    sources: tuple[str, ...]
    agents: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    attempts: int = 1
    limits: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    split: str | None = None
    seed: int = 0
    condition: str | None = None
    ablate: tuple[str, ...] = ()
    perturb: tuple[str, ...] = ()
    tool_faults: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    allow_network: str | None = None
    predictions: str | None = None
    stop_when: str | None = None
    record_snapshots: str | None = None
    gateway: str | None = None
    runtime: str | None = None
    min_tier: str | None = None
    run_id: str = field(default_factory=lambda: new_id("run"))


def plan_request(request: Request) -> RunPlan:
    """Load everything that is asked for and lay it out as a plan. Raises ConfigError or RefusedError."""
    gateway = load_gateway(request.gateway)
    if request.predictions is not None:
        if request.agents:
            raise ConfigError("a predictions file is graded without an agent", field="--agent", remedy="leave it out")
        agents, digest = [predictions_agent(Path(request.predictions))], digest_file(Path(request.predictions))
    else:
        agents, digest = load_agents(request.agents, request.models, request.options, gateway), None
    network = NetworkGrant.parse(request.allow_network) if request.allow_network is not None else None
    datasets = load_datasets(request.sources, request.select, network=network is not None)
    return _plan(
        datasets,
        agents,
        run_id=request.run_id,
        attempts=request.attempts,
        seed=request.seed,
        limits=parse_limits(request.limits),
        condition=_condition(request.condition),
        asked=Asked(request.ablate, request.perturb, request.tool_faults, request.faults),
        network=network,
        select=request.select,
        split=request.split,
        stop_when=request.stop_when,
        record_snapshots=read_every(request.record_snapshots) if request.record_snapshots else None,
        isolation=Isolation.parse(request.runtime, request.min_tier),
        gateway_file=request.gateway,
        gateway=gateway,
        predictions=os.path.abspath(request.predictions) if request.predictions is not None else None,
        predictions_digest=digest,
    )


def _condition(name: str | None) -> str | None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", name):
        remedy = "letters, digits, dot, underscore, plus and minus, at most 64"
        raise ConfigError(f"{name!r} is not the name of a condition", field="--condition", remedy=remedy)
    return name


def plan_again(lock: RunLock) -> RunPlan:
    """The plan of a run that was begun before, from its lock; tasks and harnesses are loaded afresh."""
    if lock.predictions is not None:
        agents, digest = [predictions_agent(Path(lock.predictions))], digest_file(Path(lock.predictions))
    else:
        agents, digest = [_agent_again(agent) for agent in lock.agents], None
    select = tuple(lock.options.get("select", ()))
    gateway_file, gateway = gateway_again(lock.options)
    return _plan(
        load_datasets(lock.sources, select, network=lock.network is not None),
        agents,
        run_id=lock.run_id,
        attempts=lock.attempts,
        seed=lock.seed,
        limits=limits_of(lock),
        condition=lock.condition if lock.options.get("condition_given", not lock.conditions) else None,
        asked=Asked.from_json(lock.options.get("conditions", {})),
        network=NetworkGrant.from_json(lock.network) if lock.network is not None else None,
        select=select,
        split=lock.options.get("split"),
        stop_when=lock.options.get("stop_when"),
        record_snapshots=lock.options.get("record_snapshots"),
        isolation=Isolation.locked(lock.options),
        gateway_file=gateway_file,
        gateway=gateway,
        predictions=lock.predictions,
        predictions_digest=digest,
    )


def _agent_again(agent: Any) -> AgentSpec:
    harness = load_harness(agent.harness.ref)
    injected = injected_by(harness)
    model = unlock_model(agent.model) if agent.model else None
    digests = {path: digest_path(Path(path)) for path in agent.option_digests}
    return AgentSpec(
        agent.label, agent.harness.ref, harness.name, harness.version, model, agent.options, digests, injected
    )


def injected_by(harness: Harness) -> dict[str, str]:
    """Digests of what a harness brings into the sandbox."""
    return harness.injected if isinstance(harness, InstalledHarness) else {}


def read_every(text: str) -> int:
    """What `--record-snapshots` takes: `every`, or a number of steps. Raises ConfigError."""
    if text == "every":
        return 1
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise ConfigError(f"{text!r} is neither `every` nor a number of steps", field="--record-snapshots")
    return int(text)


def load_datasets(sources: Sequence[str], select: Sequence[str], *, network: bool = False) -> list[Dataset]:
    """The datasets at these paths. A pattern in `select` has to match in at least one of them. `network`: whether tasks
    are given the network that they ask for."""
    if not sources:
        raise ConfigError("no tasks are given", field="TASKS", remedy="give a task directory, a dataset or SWE rows")
    if len(sources) == 1:
        return [load_any(Path(sources[0]), select=select, network=network)]
    found, failures = [], []
    for source in sources:
        try:
            found.append(load_any(Path(source), select=select, network=network))
        except ConfigError as error:
            if not select or "no task is selected" not in error.message:
                raise
            failures.append(error)
    if not found:
        raise failures[0]
    return found


def _plan(
    datasets: Sequence[Dataset],
    agents: Sequence[AgentSpec],
    *,
    select: Sequence[str],
    split: str | None,
    stop_when: str | None,
    record_snapshots: int | None = None,
    condition: str | None,
    asked: Asked,
    isolation: Isolation,
    gateway_file: str | None,
    gateway: GatewayConfig | None,
    **rest: Any,
) -> RunPlan:
    entries = [entry for dataset in datasets for entry in dataset.entries if split is None or entry.split == split]
    unrunnable = tuple(task for dataset in datasets for task in dataset.unrunnable)
    if not entries:
        where = ", ".join(str(dataset.path) for dataset in datasets)
        if unrunnable:
            reasons = "; ".join(f"{task.name}: {task.reason}" for task in unrunnable)
            raise ConfigError(f"none of its tasks can be run here: {reasons}", field=where,
                              remedy="give each what its reason says it lacks")  # fmt: skip
        raise ConfigError("no task is left to run", field=where, remedy="check --task and --split")
    check_unique([entry.task.name for entry in entries], "task")
    check_unique([agent.label for agent in agents], "agent")
    one = datasets[0] if len(datasets) == 1 else None
    conditions = make_conditions(asked, condition, [entry.task for entry in entries])
    options: dict[str, Any] = {"select": list(select), "split": split}
    options |= {"stop_when": stop_when} if stop_when else {}
    options |= {"record_snapshots": record_snapshots} if record_snapshots else {}
    options |= isolation.as_options()
    options |= locked(gateway_file, gateway)
    options |= {"conditions": asked.as_json(), "condition_given": condition is not None} if asked else {}
    plan = RunPlan(
        dataset_name=one.name if one else "+".join(dataset.name for dataset in datasets),
        dataset_version=one.version if one else "",
        dataset_digest=one.digest if one else digest_json([dataset.digest for dataset in datasets]),
        sources=tuple(str(dataset.path) for dataset in datasets),
        entries=tuple(entries),
        agents=tuple(agents),
        unrunnable=unrunnable,
        options=options,
        conditions=conditions,
        gateway=gateway,
        **rest,
    )
    check_keys(plan.agents)
    check_enforceable(plan)
    check_faults(plan)
    if asked and (stop_when or plan.predictions is not None):
        field = "--stop-when" if stop_when else "--predictions"
        raise ConfigError("does not go with --ablate, --perturb, --tool-faults and --faults", field=field,
                          remedy="run one of them by itself")  # fmt: skip
    if stop_when:
        make_rule(stop_when, plan)
    return plan


def check_keys(agents: Iterable[AgentSpec]) -> None:
    """Every key that a model needs is in the environment: better said now than after the images are built."""
    for agent in agents:
        name = agent.model.api_key_env if agent.model else None
        if name is not None and not os.environ.get(name, "").strip():
            raise ConfigError(f"the environment variable {name} is not set", field=f"--model of {agent.label}",
                              remedy="export the key")  # fmt: skip


def check_faults(plan: RunPlan) -> None:
    """Refuse faults of a network that no sandbox of the run has."""
    if not any(condition.network_faults for condition in plan.conditions):
        return
    inside = any(isinstance(load_harness(agent.ref), InstalledHarness) for agent in plan.agents)
    if not inside and all(entry.task.network.agent.mode == "none" for entry in plan.entries):
        raise ConfigError("no agent's sandbox of this run has a network that could fail", field="--faults",
                          remedy="--allow-network asked, or an agent that works in the sandbox")  # fmt: skip


def check_enforceable(plan: RunPlan) -> None:
    """Refuse a limit on cost where the price of a model is unknown: it could not be enforced."""
    for agent in plan.agents:
        if agent.model is None or agent.model.prices is not None:
            continue
        for entry in plan.entries:
            limits = effective_limits(entry.task, plan.limits)
            if any(
                one.limits(entry.task, limits).get("cost_usd", limits.cost_usd) is not None for one in plan.conditions
            ):
                raise RefusedError(
                    f"the price of {agent.model.name} is unknown, so a limit on cost cannot be enforced",
                    field=f"{entry.task.name}: cost_usd",
                    remedy="give the model's prices in a model file",
                )


def predictions_agent(path: Path) -> AgentSpec:
    """The agent that a predictions file stands for: labelled by the model's name when there is exactly one."""
    from proctor.tasks import load_predictions

    models = {prediction.model for prediction in load_predictions(path).values()}
    label = next(iter(models)) if len(models) == 1 else None
    return AgentSpec(label=label or PREDICTIONS, ref=PREDICTIONS, name=PREDICTIONS, version="1")


def load_agents(
    agents: Sequence[str], models: Sequence[str], options: Sequence[str], gateway: GatewayConfig | None = None
) -> list[AgentSpec]:
    """`[LABEL=]NAME` or `[LABEL=]module:Class` for each agent; each that needs a model is taken with every model. With
    a gateway, `models` are names of models in its file; none means all."""
    from proctor.models.spec import load_model

    if not agents:
        raise ConfigError("no agent is given", field="--agent", remedy="give --agent NAME, or --predictions FILE")
    specs = gateway_models(gateway, models) if gateway else [load_model(text) for text in models]
    wanted = [_Wanted(*_split_label(text)) for text in agents]
    give_options(options, wanted)
    found: list[AgentSpec] = []
    for agent in wanted:
        harness = agent.harness
        if harness.needs_model and not specs:
            remedy = "give --model NAME@URL or a model file, or --gateway FILE"
            raise ConfigError(f"harness {harness.name} needs a model", field="--model", remedy=remedy)
        agent.check_options()
        chosen: Sequence[ModelSpec | None] = specs if harness.needs_model else [None]
        digests = {value: digest_path(Path(value)) for value in agent.options.values() if _is_path(value)}
        for model in chosen:
            name = agent.label or harness.name
            if model is not None and (agent.label is None or len(specs) > 1):
                name = f"{name}+{model.name}"
            if model is not None and gateway is not None:
                check_protocols(gateway, harness, model.name)
            injected = injected_by(harness)
            found.append(
                AgentSpec(name, agent.ref, harness.name, harness.version, model, agent.options, digests, injected)
            )
    if specs and not any(agent.model for agent in found):
        raise ConfigError("no agent here uses a model", field="--model", remedy="leave it out, or choose another agent")
    return found


class _Wanted:
    """An agent as asked for, with its harness and the options that turned out to be its own."""

    def __init__(self, label: str | None, ref: str) -> None:
        self.label = label
        self.ref = ref
        self.harness = load_harness(ref)
        self.options: dict[str, Any] = {}
        self.model: type[BaseModel] | None = getattr(self.harness, "options_model", None)

    def is_called(self, name: str) -> bool:
        return name in (self.label or self.ref, self.harness.name)

    def takes(self, key: str) -> bool:
        return self.model is not None and key in self.model.model_fields

    def check_options(self) -> None:
        if self.model is None:
            return
        try:
            self.model.model_validate(self.options)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"]))
            known = ", ".join(self.model.model_fields)
            raise ConfigError(first["msg"], field=f"--option {name}",
                              remedy=f"{self.harness.name} takes: {known}") from error  # fmt: skip


def _split_label(text: str) -> tuple[str | None, str]:
    label, equals, ref = text.partition("=")
    if equals and (not label or not ref):
        raise ConfigError(f"{text!r} is not LABEL=NAME", field="--agent")
    if not equals:
        label, ref = "", text
    # A recipe has to be found again from wherever the run is resumed.
    return label or None, os.path.abspath(ref) if ref.endswith(".toml") else ref


def give_options(options: Sequence[str], agents: Sequence[_Wanted]) -> None:
    """Hand each option to its agent: `LABEL.KEY=VALUE` to the one with that label, `KEY=VALUE` to every one that
    takes it.

    A value is read as JSON where it is JSON, else as text; the path of something that exists is made absolute.
    """
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{text!r} is not KEY=VALUE", field="--option")
        label, dot, key = name.rpartition(".")
        targets = [
            agent for agent in agents if (agent.is_called(label) if dot else agent.takes(key) or len(agents) == 1)
        ]
        if not targets:
            who = f"is called {label!r}" if dot else f"takes {key!r}"
            remedy = f"write LABEL.{key}=VALUE, LABEL one of {', '.join(a.label or a.ref for a in agents)}"
            raise ConfigError(f"no agent {who}", field=f"--option {name}", remedy=remedy)
        for agent in targets:
            if key in agent.options:
                raise ConfigError("given twice", field=f"--option {name}")
            agent.options[key] = _value(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        looks_like_path = os.sep in text or Path(text).suffix != ""
        return os.path.abspath(text) if looks_like_path and Path(text).exists() else text


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and os.path.isabs(value) and Path(value).exists()


def digest_path(path: Path) -> str:
    """Digest of a file, or of a folder's content."""
    if not path.exists():
        raise ConfigError("an option names it, but it does not exist", field=str(path))
    return digest_tree(path) if path.is_dir() else digest_file(path)


def parse_limits(limits: Sequence[str]) -> dict[str, float]:
    """`KEY=VALUE` limits by the field names of AgentLimits, each a positive number."""
    parsed: dict[str, float] = {}
    for text in limits:
        name, _, value = text.partition("=")
        if name not in LIMIT_NAMES:
            raise ConfigError(f"unknown limit {name!r}", field="--limit", remedy=f"one of {', '.join(LIMIT_NAMES)}")
        try:
            number = LIMIT_NAMES[name](value)
        except ValueError as error:
            kind = LIMIT_NAMES[name].__name__
            raise ConfigError(f"{value!r} is not a number ({kind})", field=f"--limit {name}") from error
        if not 0 < number < float("inf"):
            raise ConfigError(f"{value} is not positive", field=f"--limit {name}")
        parsed[name] = number
    return parsed


def limits_of(lock: RunLock) -> Mapping[str, float]:
    """The run's limits as a plan holds them (JSON has no separate integers)."""
    return {name: LIMIT_NAMES[name](value) for name, value in lock.limits.items()}
