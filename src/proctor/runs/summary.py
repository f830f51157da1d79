"""From a run directory to numbers that can be defended: every total is computed from the records, none is stored.

Every rate comes with its denominators: how many trials were planned, graded, and excluded for which reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from proctor.runs.formats import RunLock, TrialResult, load
from proctor.runs.ledger import Ledger, LedgerError, read_ledger, verify_ledger
from proctor.runs.outcome import Outcome
from proctor.runs.vouching import is_vouched, lock_damage

if TYPE_CHECKING:
    from pathlib import Path

NOT_RUN = "not_run"
"""Why a planned trial is not in the denominator when it has no outcome: it has not been run (yet)."""
UNRUNNABLE = "unrunnable"
"""The same for a task of the dataset that cannot be run here: it stays in the count of what there is to do."""
STOPPED = "stopped"
"""Why a planned trial has no outcome when a stopping rule ended the run before it."""
_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A trial as the ledger planned it, with its result once it has one."""

    id: str
    task: str
    agent: str
    attempt: int
    result: TrialResult | None
    status: str
    """The outcome; without a result `cancelled`, `stopped` or `not_run`."""
    condition: str = "plain"


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as it is on disk. `damage` says what is wrong with ledger or lock, if anything is; `vouched`, whether the
    ledger names the lock."""

    directory: Path
    lock: RunLock
    ledger: Ledger
    trials: tuple[PlannedTrial, ...]
    damage: str | None
    vouched: bool = True

    def rows(self) -> list[AgentRow]:
        """The table: one row for each agent of the lock."""
        unrunnable = len(self.lock.unrunnable) * self.lock.attempts
        agents = [agent.label for agent in self.lock.agents]
        found = summarise(self.under(self.lock.condition), agents, unrunnable=unrunnable)
        for condition in self.conditions[1:]:
            found += [replace(row, condition=condition) for row in summarise(self.under(condition), agents)]
        return found

    @property
    def conditions(self) -> tuple[str, ...]:
        """What trials ran under, that of the run first. No rate mixes two of them."""
        return tuple(
            dict.fromkeys(
                [
                    self.lock.condition,
                    *(one.name for one in self.lock.conditions),
                    *(trial.condition for trial in self.trials),
                ]
            )
        )

    def under(self, condition: str) -> tuple[PlannedTrial, ...]:
        """The trials under one condition."""
        return tuple(trial for trial in self.trials if trial.condition == condition)

    def trial(self, trial_id: str) -> PlannedTrial | None:
        """The planned trial with this id."""
        return next((trial for trial in self.trials if trial.id == trial_id), None)


@dataclass(frozen=True, slots=True)
class AgentRow:
    """One line of the table: an agent over all tasks.

    `rate` averages the attempts at a task first; `low` and `high` are its 95 % Wilson interval over tasks. `worst`
    and `best` are the rates if every excluded trial had failed or passed.
    """

    agent: str
    planned: int
    graded: int
    resolved: int
    tasks: int
    rate: float | None
    low: float | None
    high: float | None
    worst: float
    best: float
    outcomes: Mapping[str, int]
    excluded: Mapping[str, int]
    model_calls: int
    tokens: int | None
    cost_usd: float | None
    duration_s: float
    condition: str = "plain"


def read_run(directory: Path) -> RunView:
    """Read a run directory. A damaged chain is reported in `damage`; a run without lock or ledger is a
    ConfigError."""
    lock = load(RunLock, directory / "run.json")
    damage = None
    try:
        ledger = verify_ledger(directory)
        damage = lock_damage(directory, ledger)
    except LedgerError as error:
        damage = error.line()
        try:
            ledger = read_ledger(directory)
        except LedgerError:
            ledger = Ledger(())
    trials = _planned(directory, lock, ledger)
    return RunView(directory, lock, ledger, trials, damage or _contradiction(trials, ledger), is_vouched(ledger))


def _contradiction(trials: Iterable[PlannedTrial], ledger: Ledger) -> str | None:
    """The first trial whose record and ledger row tell different outcomes. `proctor show RUN TRIAL` checks every byte.

    An `infra_error` does not bind: a crash may have come between its replacement and the row that says so.
    """
    ended = {row.data["trial"]: row.data["outcome"] for row in ledger.of("ended")}
    for trial in trials:
        outcome = ended.get(trial.id, Outcome.INFRA_ERROR)
        if outcome not in (Outcome.INFRA_ERROR, trial.status):
            found = f"its record says {trial.status}" if trial.result else "its record is gone"
            return f"trial {trial.id} ended as {outcome}, but {found}"
    return None


def _planned(directory: Path, lock: RunLock, ledger: Ledger) -> tuple[PlannedTrial, ...]:
    without = {row.data["trial"]: str(Outcome.CANCELLED) for row in ledger.of("cancelled")}
    without |= {trial_id: STOPPED for row in ledger.of("stopped") for trial_id in row.data["trials"]}
    trials = []
    for row in ledger.of("planned"):
        trial_id, path = row.data["trial"], directory / "trials" / row.data["trial"] / "result.json"
        result = load(TrialResult, path) if path.exists() else None
        status = str(result.outcome) if result else without.get(trial_id, NOT_RUN)
        data = row.data
        condition = data.get("condition", lock.condition)
        trials.append(PlannedTrial(trial_id, data["task"], data["agent"], data["attempt"], result, status, condition))
    return tuple(trials)


def summarise(trials: Iterable[PlannedTrial], agents: Sequence[str], *, unrunnable: int = 0) -> list[AgentRow]:
    """One row for each agent, in the order given. `unrunnable` counts what each agent's plan lacks of the dataset."""
    by_agent: dict[str, list[PlannedTrial]] = {agent: [] for agent in agents}
    for trial in trials:
        by_agent.setdefault(trial.agent, []).append(trial)
    return [_row(agent, of_agent, unrunnable) for agent, of_agent in by_agent.items()]


def _row(agent: str, trials: Sequence[PlannedTrial], unrunnable: int) -> AgentRow:
    results = [trial.result for trial in trials if trial.result is not None]
    graded = [result for result in results if result.outcome.is_graded]
    resolved = sum(result.outcome is Outcome.RESOLVED for result in graded)
    outcomes = Counter(trial.status for trial in trials)
    excluded = {
        reason: count
        for reason, count in sorted(outcomes.items())
        if reason in (NOT_RUN, STOPPED) or not Outcome(reason).is_graded
    }
    if unrunnable:
        excluded[UNRUNNABLE] = unrunnable
    planned = len(trials) + unrunnable
    out = sum(excluded.values())
    per_task = rates_by_task(graded)
    rate = sum(per_task.values()) / len(per_task) if per_task else None
    low, high = wilson(rate * len(per_task), len(per_task)) if rate is not None else (None, None)
    return AgentRow(
        agent=agent,
        planned=planned,
        graded=len(graded),
        resolved=resolved,
        tasks=len(per_task),
        rate=rate,
        low=low,
        high=high,
        worst=resolved / planned if planned else 0.0,
        best=(resolved + out) / planned if planned else 1.0,
        outcomes=dict(sorted(outcomes.items())),
        excluded=excluded,
        model_calls=sum(result.usage.model_calls for result in results),
        tokens=_known_sum(_tokens(result) for result in results),
        cost_usd=_known_sum(result.usage.cost_usd for result in results if result.usage.model_calls),
        duration_s=sum(result.duration_s for result in results),
    )


def rates_by_task(graded: Iterable[TrialResult]) -> dict[str, float]:
    """For each task, the share of its graded attempts that were resolved."""
    attempts: dict[str, list[bool]] = {}
    for result in graded:
        attempts.setdefault(result.task, []).append(result.outcome is Outcome.RESOLVED)
    return {task: sum(passed) / len(passed) for task, passed in attempts.items()}


def wilson(successes: float, n: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927; Brown, Cai and DasGupta 2001).

    `successes` may be fractional: with several attempts at each task it is the sum of the tasks' mean rates and `n`
    the number of tasks, so repeats never make the interval narrower than independent tasks would.
    """
    if n <= 0:
        raise ValueError("an interval needs at least one observation")
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def _tokens(result: TrialResult) -> int | None:
    usage = result.usage
    if not usage.model_calls:
        return 0
    if usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    return usage.prompt_tokens + usage.completion_tokens


def _known_sum(values: Iterable[Any]) -> Any:
    """The sum, or None when a part of it is unknown."""
    known = list(values)
    return None if None in known else sum(known)


def as_json(view: RunView) -> dict[str, Any]:
    """The run as `proctor show --json` prints it."""
    rows = view.rows()
    return {
        "run_id": view.lock.run_id,
        "directory": str(view.directory),
        "dataset": view.lock.dataset.model_dump(),
        "ledger": {
            "ok": view.damage is None,
            "damage": view.damage,
            "lock_vouched": view.vouched,
            **view.ledger.head.model_dump(),
        },
        "unrunnable": [task.model_dump() for task in view.lock.unrunnable],
        "agents": [{name: _jsonable(getattr(row, name)) for name in AgentRow.__dataclass_fields__} for row in rows],
        "trials": [
            {
                "trial": trial.id,
                "task": trial.task,
                "agent": trial.agent,
                "attempt": trial.attempt,
                "condition": trial.condition,
                "outcome": trial.status,
                "stop": trial.result.stop if trial.result else None,
                "detail": trial.result.detail if trial.result else "",
                "verdict": trial.result.verdict if trial.result else None,
                "compat_resolved": trial.result.compat_resolved if trial.result else None,
                "rewards": trial.result.rewards if trial.result else {},
                "tries": trial.result.tries if trial.result else 0,
                "duration_s": trial.result.duration_s if trial.result else None,
            }
            for trial in view.trials
        ],
    }


def _jsonable(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
