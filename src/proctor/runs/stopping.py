"""`--stop-when`: end a run as soon as its own results answer the question, by a test that allows for looking.

Two things keep this honest. Results count in an order that was drawn before the first trial, never in the order in
which trials happen to end: an agent that fails quickly would otherwise be seen failing first. And every planned trial
that a rule leaves out stays in the ledger, as `stopped`, with the rule and what it saw.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from proctor.common import ConfigError
from proctor.runs.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proctor.runs.formats import TrialResult
    from proctor.runs.plan import RunPlan, TrialPlan

FIELD = "--stop-when"
RULES: Mapping[str, Mapping[str, float | None]] = {
    "difference": {"alpha": 0.05},
    "sprt": {"p0": None, "p1": None, "alpha": 0.05, "beta": 0.10},
}
"""What a rule takes, with defaults; None has to be given."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A rule's decision: in words, and the numbers it rests on."""

    rule: str
    reason: str
    facts: Mapping[str, Any]


class StopRule(Protocol):
    """Says in which order trials are to be started, hears of every trial that ended, and may end the run."""

    def order(self, trials: Sequence[TrialPlan]) -> list[TrialPlan]: ...

    def take(self, result: TrialResult) -> None: ...

    def decision(self) -> Stop | None: ...


def parse_rule(text: str) -> tuple[str, dict[str, float]]:
    """`difference`, `difference:alpha=0.01`, `sprt:p0=0.6,p1=0.8`: the rule's name and its numbers."""
    name, _, rest = text.partition(":")
    if name not in RULES:
        raise ConfigError(f"there is no rule {name!r}", field=FIELD, remedy=f"one of {', '.join(RULES)}")
    values = dict(RULES[name])
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, _, value = part.partition("=")
        if key not in values:
            raise ConfigError(f"{name} takes no {key!r}", field=FIELD, remedy=f"it takes {', '.join(values)}")
        try:
            values[key] = float(value)
        except ValueError as error:
            raise ConfigError(f"{value!r} is not a number", field=f"{FIELD} {key}") from error
    given = {key: value for key, value in values.items() if value is not None}
    if missing := values.keys() - given.keys():
        raise ConfigError(f"{name} needs {', '.join(sorted(missing))}", field=FIELD, remedy="sprt:p0=0.6,p1=0.8")
    if not 0 < given["alpha"] < 1:
        raise ConfigError(f"{given['alpha']:g} is not between 0 and 1", field=f"{FIELD} alpha")
    return name, given


def make_rule(text: str, plan: RunPlan) -> StopRule:
    """The rule for this plan. Raises ConfigError when it does not fit the plan."""
    name, values = parse_rule(text)
    labels = [agent.label for agent in plan.agents]
    if name == "difference":
        if len(labels) < 2:
            raise ConfigError("a difference is between two agents", field=FIELD, remedy="give --agent twice")
        return DifferenceRule(text, plan, values["alpha"])
    if len(labels) > 1 or plan.attempts > 1:
        raise ConfigError("sprt tests one agent with one attempt at each task", field=FIELD,
                          remedy="one --agent and --attempts 1, or `difference`")  # fmt: skip
    return RateRule(text, plan, values)


class _Drawn:
    """Units (tasks, or clusters of tasks) in an order drawn from the run's seed."""

    def __init__(self, plan: RunPlan, *, by_cluster: bool) -> None:
        self.unit = {
            entry.task.name: (entry.task.cluster or entry.task.name) if by_cluster else entry.task.name
            for entry in plan.entries
        }

        def drawn(unit: str) -> bytes:
            return hashlib.sha256(f"proctor-stop-order-1:{plan.seed}:{unit}".encode()).digest()

        self.units = sorted(set(self.unit.values()), key=drawn)
        place = {unit: number for number, unit in enumerate(self.units)}
        self._place = {task: place[unit] for task, unit in self.unit.items()}
        self.waiting: dict[str, set[str]] = {unit: set() for unit in self.units}
        for trial in plan.trials():
            self.waiting[self.unit[trial.task.name]].add(trial.id)
        self.results: dict[str, list[TrialResult]] = {unit: [] for unit in self.units}
        self.counted = 0

    def order(self, trials: Sequence[TrialPlan]) -> list[TrialPlan]:
        """Unit by unit; within a unit as planned."""
        return sorted(trials, key=lambda trial: self._place[trial.task.name])

    def take(self, result: TrialResult) -> list[list[TrialResult]]:
        """One more result. Returns the units that can be counted now: complete, and none before them is not."""
        unit = self.unit[result.task]
        if result.trial_id not in self.waiting[unit]:
            return []
        self.waiting[unit].remove(result.trial_id)
        self.results[unit].append(result)
        ready = []
        while self.counted < len(self.units) and not self.waiting[self.units[self.counted]]:
            ready.append(self.results[self.units[self.counted]])
            self.counted += 1
        return ready


class DifferenceRule:
    """Stop when the evidence that every other agent differs from the first one suffices.

    For each it is the e-value of `proctor.analysis.sequential`, over tasks or clusters; it has to reach
    (number of comparisons) / alpha. It may be looked at after every trial.
    """

    def __init__(self, text: str, plan: RunPlan, alpha: float) -> None:
        from proctor.analysis.sequential import SymmetricEvidence

        self._text = text
        self._drawn = _Drawn(plan, by_cluster=True)
        self._baseline, *others = (agent.label for agent in plan.agents)
        self._evidence = {label: SymmetricEvidence() for label in others}
        self._sums = dict.fromkeys(others, 0.0)
        self._threshold = len(others) / alpha
        self._reached: dict[str, tuple[float, int, str]] = {}

    def order(self, trials: Sequence[TrialPlan]) -> list[TrialPlan]:
        """Cluster by cluster, in drawn order."""
        return self._drawn.order(trials)

    def take(self, result: TrialResult) -> None:
        """Count what has become countable."""
        for unit in self._drawn.take(result):
            means = _means(unit)
            for label, evidence in self._evidence.items():
                both = [
                    (of[label] - of[self._baseline]) for of in means.values() if {label, self._baseline} <= of.keys()
                ]
                if both:
                    evidence.add(sum(both), float(len(both)))
                    self._sums[label] += sum(both)
                if evidence.value >= self._threshold:
                    sign = "+" if self._sums[label] > 0 else "-"
                    self._reached.setdefault(label, (evidence.value, evidence.units, sign))

    def decision(self) -> Stop | None:
        """Once every comparison has crossed its threshold, whatever came after."""
        if self._reached.keys() != self._evidence.keys():
            return None
        words = [
            f"{label} differs from {self._baseline} ({sign}, e = {value:.3g})"
            for label, (value, _, sign) in self._reached.items()
        ]
        facts = {
            "threshold": round(self._threshold, 6),
            "e_values": {label: round(value, 6) for label, (value, _, _) in self._reached.items()},
            "units": {label: units for label, (_, units, _) in self._reached.items()},
        }
        return Stop(self._text, "; ".join(words), facts)


class RateRule:
    """Stop when Wald's SPRT accepts one of two resolve rates."""

    def __init__(self, text: str, plan: RunPlan, values: Mapping[str, float]) -> None:
        from proctor.analysis.sequential import SPRT

        self._text = text
        self._test = SPRT(**values)
        self._drawn = _Drawn(plan, by_cluster=False)
        self._outcomes: list[bool] = []

    def order(self, trials: Sequence[TrialPlan]) -> list[TrialPlan]:
        """Tasks in drawn order."""
        return self._drawn.order(trials)

    def take(self, result: TrialResult) -> None:
        """Count what has become countable; what has no verdict is passed over."""
        for unit in self._drawn.take(result):
            self._outcomes += [trial.outcome is Outcome.RESOLVED for trial in unit if trial.outcome.is_graded]

    def decision(self) -> Stop | None:
        """When a bound has been crossed."""
        decided, count = self._test.decide(self._outcomes)
        if decided == "undecided":
            return None
        rate = self._test.p1 if decided == "above" else self._test.p0
        facts = {"graded": count, "resolved": sum(self._outcomes[:count]),
                 "log_ratio": round(self._test.log_ratio(self._outcomes[:count]), 6)}  # fmt: skip
        return Stop(self._text, f"a resolve rate of {rate:g} is accepted after {count} graded trials", facts)


def _means(results: Sequence[TrialResult]) -> dict[str, dict[str, float]]:
    """task -> agent -> mean score of its graded trials."""
    from proctor.runs.frame import score

    scores: dict[str, dict[str, list[float]]] = {}
    for result in results:
        if (value := score(result)) is not None:
            scores.setdefault(result.task, {}).setdefault(result.agent, []).append(value)
    return {task: {agent: sum(v) / len(v) for agent, v in agents.items()} for task, agents in scores.items()}
