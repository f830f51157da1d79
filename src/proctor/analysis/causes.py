"""One primary cause for each trial that was not resolved, in a fixed order of precedence, and an account that adds up.

The order is: host, tool, budget, missing, format, constraint, claim, regression, partial. A trial that none of them
fits is *unclassified*, and stays so: a rule does not guess what a person would have to judge. Format is a
fact from a second grading of the same work in the right form (`proctor.grading.near_miss`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proctor.analysis.frame import GRADED, under

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from proctor.analysis.observed import Certainty, Observed, Signal

UNCLASSIFIED = "unclassified"
RESOLVED = "resolved"
NOT_RUN = "not run"
ENDED = (*GRADED, "infra_error", "verifier_error")
"""Outcomes of trials that were run to some end; the others (planned, cancelled, stopped, unrunnable) never were."""
MEANINGS: Mapping[str, str] = {
    "host": "the machinery failed; outside of every rate",
    "tool": "the verifier or a tool failed by itself; not the agent's doing",
    "budget": "a limit of time, steps, tokens, cost or memory ended it",
    "missing": "nothing was delivered: no attempt, a refusal, or nothing that could be graded",
    "format": "right but for its form, by a second grading",
    "constraint": "a rule of the exam was broken",
    "claim": "it claims what nothing on record shows",
    "regression": "what passed before is broken",
    "partial": "some target tests pass, not all",
    UNCLASSIFIED: "graded as failed, and no rule says more",
}
"""Every cause, in the order of precedence, with what it means."""
_SIGNALS: Mapping[str, str] = {
    "host fault": "host",
    "verifier fault": "tool",
    "tool fault": "tool",
    "budget end": "budget",
    "missing deliverable": "missing",
    "no attempt": "missing",
    "refusal": "missing",
    "format near-miss": "format",
    "constraint broken": "constraint",
    "claim without event": "claim",
    "regression broken": "regression",
    "partial target": "partial",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """The primary cause of a trial and the signals that it rests on (none when unclassified)."""

    name: str
    certainty: Certainty
    signals: tuple[Signal, ...]

    @property
    def text(self) -> str:
        """The cause in a sentence."""
        return self.signals[0].text if self.signals else MEANINGS[self.name]


def primary_cause(seen: Observed, found: Sequence[Signal]) -> Cause | None:
    """The cause that comes first; None for a resolved trial."""
    if seen.outcome == RESOLVED:
        return None
    by_cause: dict[str, list[Signal]] = {}
    for signal in found:
        if signal.name in _SIGNALS:
            by_cause.setdefault(_SIGNALS[signal.name], []).append(signal)
    for name in MEANINGS:
        if name in by_cause:
            certain = any(signal.certainty == "fact" for signal in by_cause[name])
            return Cause(name, "fact" if certain else "heuristic", tuple(by_cause[name]))
    return Cause(UNCLASSIFIED, "fact", ())


@dataclass(frozen=True, slots=True)
class Account:
    """All planned trials by what became of them: resolved, each cause, or never run. The sum is what was planned."""

    planned: int
    counts: Mapping[str, int]
    by_agent: Mapping[str, Mapping[str, int]]
    by_outcome: Mapping[str, Mapping[str, int]]
    signals: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Signal -> agent -> trials in which it was seen."""
    certainties: Mapping[str, Certainty] = field(default_factory=dict)

    @property
    def reconciles(self) -> bool:
        """Whether every planned trial is in the account exactly once, under an outcome that allows it."""
        graded_causes = set(MEANINGS) - {"host"}
        right = all(
            set(causes) == {RESOLVED} if outcome == RESOLVED
            else set(causes) <= graded_causes if outcome in GRADED
            else set(causes) <= {"host"} if outcome == "infra_error"
            else set(causes) <= {"tool"} if outcome == "verifier_error"
            else set(causes) == {NOT_RUN}
            for outcome, causes in self.by_outcome.items()
        )  # fmt: skip
        return right and sum(self.counts.values()) == self.planned


@dataclass(frozen=True, slots=True)
class Judged:
    """A trial with its signals and its cause."""

    seen: Observed
    signals: tuple[Signal, ...]
    cause: Cause | None


def judge(seen: Observed) -> Judged:
    """Look at one trial."""
    from proctor.analysis.signals import signals

    found = signals(seen)
    return Judged(seen, found, primary_cause(seen, found))


def account(judged: Iterable[Judged], not_run: Iterable[tuple[str, str]]) -> Account:
    """The account of trials with a record, and of those without one as (agent, outcome)."""
    counts: Counter[str] = Counter()
    by_agent: dict[str, Counter[str]] = {}
    by_outcome: dict[str, Counter[str]] = {}
    seen_in: dict[str, Counter[str]] = {}
    certainties: dict[str, Certainty] = {}
    entries = [(agent, outcome, NOT_RUN) for agent, outcome in not_run]
    for one in judged:
        agent, condition = one.seen.behaviour.agent, one.seen.behaviour.condition
        agent = under(agent, condition)
        entries.append((agent, one.seen.outcome, one.cause.name if one.cause else RESOLVED))
        for name, certainty in {signal.name: signal.certainty for signal in one.signals}.items():
            seen_in.setdefault(name, Counter())[agent] += 1
            certainties[name] = certainty
    for agent, outcome, name in entries:
        counts[name] += 1
        by_agent.setdefault(agent, Counter())[name] += 1
        by_outcome.setdefault(outcome, Counter())[name] += 1
    order = [RESOLVED, *MEANINGS, NOT_RUN]
    return Account(
        planned=len(entries),
        counts={name: counts[name] for name in order if counts[name]},
        by_agent=by_agent,
        by_outcome=by_outcome,
        signals=seen_in,
        certainties=certainties,
    )
