"""What a report says, as values: every renderer (page, Markdown, JSON, JUnit) shows the same `Report`.

Parts that could not be computed are None and named in `absent`, with the reason, so that a reader never mistakes a
missing section for a good one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.analysis.aggregate import Aggregate
    from proctor.analysis.cards import Card
    from proctor.analysis.comparison import Comparison
    from proctor.analysis.crossed import Crossed
    from proctor.analysis.drift import Drift

Standing = Literal["sound", "reservations", "broken"]
Tone = Literal["good", "bad", "warn", "info", "quiet"]


@dataclass(frozen=True, slots=True)
class FindingCount:
    """One kind of finding: how often, how severe, and the first trials that have it."""

    kind: str
    severity: str
    count: int
    trials: tuple[int, ...]
    """Numbers of trials in the matrix, at most a few."""


@dataclass(frozen=True, slots=True)
class Trust:
    """How far the numbers can be trusted, from the records.

    `standing` is `broken` when a ledger or a record was changed, `reservations` when something weakens the numbers
    (each is a line of `reservations`), else `sound`. Counts are of trials; `unchecked` have no record beside them.
    """

    standing: Standing
    statement: str
    broken: tuple[str, ...]
    reservations: tuple[str, ...]
    records: int
    unchecked: int
    intact: int
    tiers: Mapping[str, int]
    networks: Mapping[str, int]
    clean_room: int
    in_place: int
    findings: tuple[FindingCount, ...]
    unstable_tests: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """One trial in the matrix. `number` is its place there from 1; `story` whether a page of it is there."""

    number: int
    run_id: str
    trial_id: str
    attempt: int
    outcome: str
    condition: str
    story: bool = False


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One task: for each agent of the matrix the marks of its attempts, in order."""

    task: str
    cells: tuple[tuple[Mark, ...], ...]
    differs: bool
    """Agents have different rates here."""
    unsolved: bool
    """No trial of it was resolved."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Tasks x agents x attempts. `left_out` tasks are not listed, because there are too many."""

    agents: tuple[str, ...]
    """The columns: agents, and once more for each condition that is not plain, with its name."""
    rows: tuple[MatrixRow, ...]
    left_out: int
    outcomes: tuple[str, ...]
    """Those that occur, in the order of the closed list."""

    @property
    def trials(self) -> int:
        """How many trials the rows hold."""
        return sum(len(cell) for row in self.rows for cell in row.cells)


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a trial's story: a text with what it is (`command`, `output`, `message`, `thought`, `error`)."""

    kind: str
    text: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class StoryStep:
    """One step of a trajectory."""

    number: int
    source: str
    at: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class StoryTest:
    """One expected test with its result."""

    name: str
    group: str
    status: str
    ok: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """A trial as a person reads it. Every text in it is hostile; renderers escape it and show control characters."""

    trial_id: str
    run_id: str
    task: str
    agent: str
    attempt: int
    outcome: str
    detail: str
    facts: tuple[tuple[str, str], ...]
    steps: tuple[StoryStep, ...]
    left_out: int
    """Steps in the middle that are not shown."""
    changes: tuple[str, ...]
    verdict: str
    verdict_facts: tuple[str, ...]
    tests: tuple[StoryTest, ...]
    findings: tuple[tuple[str, str, str], ...]
    """Severity, kind, detail."""
    rooms: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    intact: bool | None
    card: Card | None = None
    """What it comes to, for a trial that was not resolved."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything. `title` and `lead` name the exam; `absent` says which parts are not there and why."""

    title: str
    lead: str
    aggregate: Aggregate
    trust: Trust
    matrix: Matrix
    comparison: Comparison | None = None
    causes: Causes | None = None
    drift: Drift | None = None
    crossed: Crossed | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cause:
    """One primary cause of failure, and how many failed trials of each agent have it."""

    name: str
    meaning: str
    counts: Mapping[str, int]
    trials: tuple[int, ...]
    """Numbers in the matrix of the first trials that have it."""


@dataclass(frozen=True, slots=True)
class CauseSignal:
    """One signal of behaviour: in how many trials of each agent it was seen. `certainty` is `fact` or `heuristic`."""

    name: str
    certainty: str
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Causes:
    """Failure causes over all agents; `looked` trials were read, `statement` says what was and was not."""

    causes: tuple[Cause, ...]
    signals: tuple[CauseSignal, ...]
    looked: int
    statement: str
