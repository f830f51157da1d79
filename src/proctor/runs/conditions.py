"""Conditions: the same tasks and agents again, with one thing changed, so that what it does can be measured in pairs.

A run has its plain trials and, for each `--ablate`, `--perturb` and `--tool-faults`, the same trials under that
condition, with the same seeds. What exactly is changed is fixed in the lock by digest before the first trial.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.agents.faults import ToolFaults
from proctor.analysis.frame import PLAIN
from proctor.common import ConfigError, digest_json
from proctor.tasks.ablations import Ablation, GivenAblation, longer_budget, read_ablations
from proctor.tasks.perturb import can_change, check_kinds, perturb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from proctor.sandbox.net import FaultProfile
    from proctor.tasks.model import AgentLimits, Task


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asked for, as text: the options `--ablate`, `--perturb`, `--tool-faults` and `--faults`."""

    ablate: tuple[str, ...] = ()
    perturb: tuple[str, ...] = ()
    tool_faults: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ablate or self.perturb or self.tool_faults or self.faults)

    def as_json(self) -> dict[str, list[str]]:
        """As the lock holds it among the options, to be planned again on resume."""
        ablate = [os.path.abspath(one) if is_file(one) else one for one in self.ablate]
        asked = {"ablate": ablate, "perturb": list(self.perturb), "tool_faults": list(self.tool_faults)}
        return asked | ({"faults": [os.path.abspath(one) for one in self.faults]} if self.faults else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Sequence[str]]) -> Asked:
        """From the options of a lock."""
        return cls(*(tuple(value.get(name, ())) for name in ("ablate", "perturb", "tool_faults", "faults")))


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition. `ablations` are names that tasks declare, `given` those that come from files or need no task."""

    name: str = PLAIN
    ablations: tuple[str, ...] = ()
    given: tuple[GivenAblation, ...] = ()
    perturb: tuple[str, ...] = ()
    tool_faults: ToolFaults | None = None
    network_faults: FaultProfile | None = None
    """How the network of the agent's sandbox misbehaves (a document of `--faults`; `proctor.sandbox.net.faults`). What
    struck is in `network.jsonl`, each with the text of the fault."""

    @property
    def is_treated(self) -> bool:
        """Whether anything is changed; a bare name changes nothing by itself."""
        return bool(self.ablations or self.given or self.perturb or self.tool_faults or self.network_faults)

    def ablations_of(self, task: Task) -> list[Ablation]:
        """What is given to this task, or taken from it."""
        own = {one.name: one for one in task.ablations}
        found = [own[name] for name in self.ablations if name in own]
        return found + [one.ablation for one in self.given if one.is_for(task.name)]

    def leaves_out(self, task: Task) -> str | None:
        """Why the task is no part of this condition; None: it is."""
        if (self.ablations or self.given) and not self.ablations_of(task):
            return "it has no such ablation"
        if self.perturb and not can_change(task.instruction, self.perturb):
            return f"{', '.join(self.perturb)} changes nothing in its instruction"
        return None

    def limits(self, task: Task, limits: AgentLimits) -> dict[str, float]:
        """The limits that this condition sets for the task."""
        changed: dict[str, float] = {}
        for ablation in self.ablations_of(task):
            changed |= ablation.budget(replace(limits, **changed))  # type: ignore[arg-type]
        return changed

    def instruction(self, task: Task, seed: int) -> str:
        """What a trial with this seed is told."""
        text = task.instruction
        for ablation in self.ablations_of(task):
            text = ablation.instruct(text)
        return perturb(text, self.perturb, seed)

    def programs(self, task: Task) -> tuple[tuple[str, bytes], ...]:
        """Executables that are in the sandbox before the agent starts, by path."""
        return tuple((one.path, one.program) for one in self.ablations_of(task) if one.path and one.program is not None)

    def digest_for(self, task: Task) -> str:
        """Digest of everything that is changed at this task."""
        faults = self.tool_faults.as_json() if self.tool_faults else None
        changed = {"ablations": [one.digest for one in self.ablations_of(task)],
                   "perturb": list(self.perturb), "tool_faults": faults}  # fmt: skip
        return digest_json(changed | ({"network_faults": self.network_faults.digest} if self.network_faults else {}))


def is_file(text: str) -> bool:
    """Whether `--ablate` names a file of ablations rather than an ablation."""
    return text.endswith(".toml")


def make_conditions(asked: Asked, name: str | None, tasks: Iterable[Task]) -> tuple[Condition, ...]:
    """The conditions of a run, the first being the one that the others are paired with.

    `name` is that of `--condition`, if it was given. Beside something to change, everything is changed at once under
    that name, without plain trials. Raises ConfigError for what no task can be run under.
    """
    found = list(_each(asked))
    if not found:
        return (Condition(name or PLAIN),)
    if name == PLAIN:
        raise ConfigError(f"what is changed cannot be called {PLAIN}", field="--condition",
                          remedy="another name, or leave --condition out to run plain trials too")  # fmt: skip
    found = [Condition(), *found] if name is None else [_together(name, found)]
    names = [condition.name for condition in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError("is asked for twice", field=twice, remedy="once is enough: use --attempts to repeat")
    everything = list(tasks)
    for condition in found:
        for task in everything:
            _check_ablations(condition, task)
        reasons = {task.name: condition.leaves_out(task) for task in everything}
        if everything and all(reasons.values()):
            known = sorted({one.name for task in everything for one in task.ablations})
            remedy = f"the tasks declare {', '.join(known)}" if known else "see docs/conditions.md"
            reason = next(iter(reasons.values()))
            raise ConfigError(f"no task can be run under it: {reason}", field=condition.name, remedy=remedy)
        if name is not None and (lacking := [n for n, reason in reasons.items() if reason]):
            raise ConfigError(f"{lacking[0]} cannot be run under it: {reasons[lacking[0]]}", field=condition.name,
                              remedy="leave that task out by --task, or leave --condition out")  # fmt: skip
    return tuple(found)


def _check_ablations(condition: Condition, task: Task) -> None:
    """Raises ConfigError for an ablation that the task gets twice, or that does not fit its instruction."""
    ablations = condition.ablations_of(task)
    names = [one.name for one in ablations]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{task.name} would get the ablation {twice} twice", field=condition.name,
                          remedy="give each another name, or keep their tasks apart")  # fmt: skip
    text = task.instruction
    try:
        for ablation in ablations:
            text = ablation.instruct(text)
    except ConfigError as error:
        raise ConfigError(f"{task.name}: {error.message}", field=error.field, remedy=error.remedy) from error


def _each(asked: Asked) -> Iterable[Condition]:
    for text in asked.ablate:
        if text.startswith("budget="):
            given = GivenAblation(longer_budget(_factor(text)), ("*",))
            yield Condition(f"ablate-{given.ablation.name}", given=(given,))
        elif is_file(text):
            by_name: dict[str, list[GivenAblation]] = {}
            for one in read_ablations(Path(text)):
                by_name.setdefault(one.ablation.name, []).append(one)
            for name, entries in by_name.items():
                yield Condition(f"ablate-{name}", given=tuple(entries))
        else:
            yield Condition(f"ablate-{text}", ablations=(text,))
    for text in asked.perturb:
        kinds = check_kinds(text)
        yield Condition(f"perturb-{'+'.join(kinds)}", perturb=kinds)
    for text in asked.tool_faults:
        faults = ToolFaults.parse(text)
        how = "" if ":" not in text else f"-{'+'.join(faults.kinds)}"
        yield Condition(f"tool-faults-{faults.rate:g}{how}", tool_faults=faults)
    for text in asked.faults:
        profile = _profile(text)
        yield Condition(f"faults-{profile.name}", network_faults=profile)


def _profile(path: str) -> FaultProfile:
    from proctor.sandbox.net import FaultProfile

    try:
        return FaultProfile.parse(Path(path).read_bytes(), field=path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="--faults", remedy="give a fault profile") from error


def _factor(text: str) -> float:
    try:
        factor = float(text.removeprefix("budget="))
    except ValueError as error:
        raise ConfigError("the factor is not a number", field=f"--ablate {text}", remedy="like budget=2") from error
    if not 0 < factor <= 1000:
        raise ConfigError("the factor is not in (0, 1000]", field=f"--ablate {text}", remedy="like budget=2")
    return factor


def _together(name: str, parts: Sequence[Condition]) -> Condition:
    faults = [one.tool_faults for one in parts if one.tool_faults]
    if len(faults) > 1:
        raise ConfigError("can be given once with --condition", field="--tool-faults")
    profiles = [one.network_faults for one in parts if one.network_faults]
    if len(profiles) > 1:
        raise ConfigError("can be given once with --condition", field="--faults")
    kinds = [kind for one in parts for kind in one.perturb]
    if len(set(kinds)) < len(kinds):
        raise ConfigError("names one kind twice", field="--perturb")
    return Condition(
        name=name,
        ablations=tuple(ablation for one in parts for ablation in one.ablations),
        given=tuple(given for one in parts for given in one.given),
        perturb=tuple(kinds),
        tool_faults=faults[0] if faults else None,
        network_faults=profiles[0] if profiles else None,
    )


def locked(condition: Condition, tasks: Iterable[Task], limits: Mapping[str, AgentLimits]) -> dict[str, Any]:
    """A condition as the lock holds it: what it changes, by task and digest, and which tasks it leaves out."""
    treated: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for task in tasks:
        if reason := condition.leaves_out(task):
            left_out[task.name] = reason
            continue
        treated[task.name] = {
            "digest": condition.digest_for(task),
            "ablations": {one.name: one.kind for one in condition.ablations_of(task)},
            "limits": condition.limits(task, limits[task.name]),
        }
    return {
        "name": condition.name,
        "perturb": list(condition.perturb),
        "tool_faults": condition.tool_faults.as_json() if condition.tool_faults else None,
        "network_faults": condition.network_faults.as_json() if condition.network_faults else None,
        "tasks": treated,
        "left_out": left_out,
    }
