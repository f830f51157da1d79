"""One trial as its record shows it: what signals, causes and cards are computed from.

`proctor.runs.failures` reads it. Everything here was written by the host, except what the agent itself said
(`final_message`, the texts of its calls).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.analysis.behaviour import Action, Behaviour

Certainty = Literal["fact", "heuristic"]


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where something is on record: a file of the trial's record, a place in it, and the text that stands there.

    `place` is a JSON pointer (RFC 6901) into a `.json` file, or a line of a `.jsonl` file: its `seq`, else its number.
    `span` is a piece of the value there, quoted; empty when the place alone is the evidence.
    """

    file: str
    place: str
    span: str = ""

    @classmethod
    def parse(cls, evidence: str, span: str = "") -> Pointer:
        """From `trajectory.json#/steps/3/tool_calls/0` or `exec.jsonl#4`."""
        file, _, place = evidence.partition("#")
        return cls(file, place, span)

    def __str__(self) -> str:
        return f"{self.file}#{self.place}"


@dataclass(frozen=True, slots=True)
class Signal:
    """One thing seen in a trial. `value` is how much of it, or which; `text` says it in a sentence."""

    name: str
    certainty: Certainty
    value: str | float
    text: str
    evidence: tuple[Pointer, ...]


@dataclass(frozen=True, slots=True)
class State:
    """The content of a whole file at one moment, as the host passed it on."""

    path: str
    digest: str
    evidence: str


@dataclass(frozen=True, slots=True)
class TestSeen:
    """One expected test of the grade."""

    __test__ = False

    test_id: str
    group: str
    status: str
    ok: bool
    unstable: bool = False


@dataclass(frozen=True, slots=True)
class FindingSeen:
    """One integrity finding of the record."""

    kind: str
    detail: str
    severity: str
    source: str = "grading"


@dataclass(frozen=True, slots=True)
class Observed:
    """A trial. `behaviour.actions` are its tool calls, `logged` the calls on the sandbox; `changed` the paths that
    differ on disk at its end (None: not known). `call_errors` are errors of tool calls by their evidence."""

    behaviour: Behaviour
    outcome: str
    stop: str
    detail: str = ""
    verdict: str | None = None
    logged: tuple[Action, ...] = ()
    call_errors: Mapping[str, str] = field(default_factory=dict)
    tests: tuple[TestSeen, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[FindingSeen, ...] = ()
    changed: tuple[str, ...] | None = None
    final_message: str = ""
    instruction: str = ""
    grade_error: str = ""
    model_errors: int = 0
    steps: int = 0
    limits: Mapping[str, float | None] = field(default_factory=dict)
    injected: Mapping[str, str] = field(default_factory=dict)
    """Calls on the sandbox and connections that were made to go wrong on purpose: how, by their evidence."""

    states: tuple[State, ...] = ()
    """Contents of whole files that were read or written through the host, in order."""
    unsupported: tuple[tuple[str, Pointer], ...] = ()
    """Numbers in what it delivers that stand nowhere else on record (`proctor.analysis.numbers`)."""
    offered: Mapping[str, Pointer] = field(default_factory=dict)
    """Special tools that it was told of, beside those that every trial of its harness has."""
    pressure: tuple[tuple[str, Pointer], ...] = ()
    """Events that show a full context: what, and where."""

    def group(self, name: str) -> tuple[TestSeen, ...]:
        """The tests of one group, `fail_to_pass` (target) or `pass_to_pass` (regression)."""
        return tuple(test for test in self.tests if test.group == name)
