"""What the records of many trials say on whether their numbers can be trusted.

Every record is read once; each is checked against the digest that the ledger has for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel

from proctor.analysis.frame import GRADED
from proctor.analysis.report.model import FindingCount, Trust
from proctor.common import ConfigError, digest_tree
from proctor.runs.formats import DiffFile, FindingsFile, GradeFile, ReceiptFile, TrialResult, load
from proctor.runs.ledger import LedgerError, read_ledger
from proctor.runs.story import TrialView
from proctor.runs.vouching import NOT_VOUCHED
from proctor.trajectories.atif import read_trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from proctor.analysis.aggregate import Aggregate

_File = TypeVar("_File", bound=BaseModel)
MANY_EXCLUDED = 0.05
"""Above this share of excluded trials the numbers carry a reservation."""
_SEVERITIES = ("disqualify", "review", "note")
_SOME = 3


def record_digests(directory: Path) -> dict[str, str]:
    """Trial id -> the digest that the ledger has for its record; empty when the ledger cannot be read."""
    try:
        ledger = read_ledger(directory)
    except LedgerError:
        return {}
    return {row.data["trial"]: row.data["record"] for row in ledger.of("ended") if row.data.get("record")}


def read_record(directory: Path, digest: str | None) -> TrialView:
    """The record of one trial. Raises ConfigError naming the file that cannot be read."""
    return TrialView(
        directory=directory,
        result=load(TrialResult, directory / "result.json"),
        trajectory=read_trajectory(directory / "trajectory.json"),
        grade=_optional(GradeFile, directory / "grade.json"),
        findings=load(FindingsFile, directory / "findings.json"),
        receipts=load(ReceiptFile, directory / "receipt.json"),
        diff=_optional(DiffFile, directory / "diff.json"),
        intact=digest_tree(directory) == digest if digest else None,
    )


def _optional(kind: type[_File], path: Path) -> _File | None:
    return load(kind, path) if path.exists() else None


@dataclass(slots=True)
class Evidence:
    """Counts while records are read; `trust` makes the statement of them."""

    records: int = 0
    intact: int = 0
    changed: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    tiers: Counter[str] = field(default_factory=Counter)
    networks: Counter[str] = field(default_factory=Counter)
    clean_room: int = 0
    in_place: int = 0
    unstable: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    where: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, trial: TrialView, number: int | None) -> None:
        """Count one record; `number` is its place in the matrix, if it is there."""
        self.records += 1
        if trial.intact:
            self.intact += 1
        elif trial.intact is False:
            self.changed.append(trial.result.trial_id)
        room = trial.receipts.agent
        if room is not None:
            self.tiers[str(room.get("tier"))[:80]] += 1
            self.networks[str(room.get("network"))[:80]] += 1
        if trial.grade is not None and trial.grade.verdict != "error":
            self.in_place += trial.grade.in_place
            self.clean_room += not trial.grade.in_place
            self.unstable += sum(test.unstable for test in trial.grade.tests)
        for key in dict.fromkeys((one.severity, one.kind[:120]) for one in trial.findings.findings):
            self.kinds[key] += 1
            seen = self.where.setdefault(key, [])
            if number is not None and len(seen) < _SOME:
                seen.append(number)

    def merge(self, other: Evidence) -> None:
        """Counts of further records, which come after these."""
        for name in ("records", "intact", "clean_room", "in_place", "unstable"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.changed += other.changed
        self.unreadable += other.unreadable
        for name in ("tiers", "networks", "kinds"):
            getattr(self, name).update(getattr(other, name))
        for key, places in other.where.items():
            self.where[key] = [*self.where.get(key, ()), *places][:_SOME]

    def trust(self, result: Aggregate) -> Trust:
        """The statement, by fixed rules; docs/report.md has them in words."""
        broken = [f"{source.name}: the ledger is damaged: {source.damage}" for source in result.provenance.inputs
                  if source.damage]  # fmt: skip
        if self.changed:
            broken.append(f"{len(self.changed)} records are not as the ledger has them: {_few(self.changed)}.")
        if self.unreadable:
            broken.append(f"{len(self.unreadable)} records cannot be read: {_few(self.unreadable)}.")
        reservations = list(self._reservations(result))
        standing = "broken" if broken else "reservations" if reservations else "sound"
        statement = {
            "broken": "These numbers cannot be trusted: what they are made from was changed or is damaged.",
            "reservations": "These numbers can be used with the reservations below.",
            "sound": f"Every ledger is whole, all {self.records:,} records are as they were committed, and everything "
            "that was graded was graded in a clean room that the candidate never saw.",
        }[standing]
        kinds = sorted(self.kinds.items(), key=lambda item: (_SEVERITIES.index(item[0][0]), -item[1], item[0][1]))
        return Trust(
            standing=standing,  # type: ignore[arg-type]
            statement=statement,
            broken=tuple(broken),
            reservations=tuple(reservations),
            records=self.records,
            unchecked=self._unchecked(result),
            intact=self.intact,
            tiers=dict(self.tiers.most_common()),
            networks=dict(self.networks.most_common()),
            clean_room=self.clean_room,
            in_place=self.in_place,
            findings=tuple(
                FindingCount(kind, severity, count, tuple(self.where[severity, kind]))
                for (severity, kind), count in kinds
            ),
            unstable_tests=self.unstable,
        )

    def _unchecked(self, result: Aggregate) -> int:
        """Trials that ended with a record that is not here (or is here, but not known to the ledger)."""
        ended = result.planned - sum(
            one.outcomes.get(name, 0) for one in result.summaries for name in ("planned", "cancelled")
        )
        return max(0, ended - self.records - len(self.unreadable))

    def _reservations(self, result: Aggregate) -> Iterable[str]:
        if unchecked := self._unchecked(result):
            yield f"{unchecked:,} of {result.planned:,} trials have no record beside them, so nothing vouches for them."
        for source in result.provenance.inputs:
            if not source.vouched:
                yield f"{source.name}: {NOT_VOUCHED}."
        if unknown := self.records - self.intact - len(self.changed):
            yield f"{unknown:,} records have no digest in a ledger."
        if self.in_place:
            yield (
                f"{self.in_place:,} trials were graded in the candidate's own room, where it may have left something."
            )
        for network, count in self.networks.items():
            if network == "open":
                yield f"{count:,} trials had an open network: the answer may have been looked up."
            if network == "public":
                yield f"{count:,} trials could reach every public host: the answer may have been looked up."
        for severity in ("disqualify", "review"):
            count = sum(number for (of, _), number in self.kinds.items() if of == severity)
            if count:
                yield f"{count:,} findings ask for {'disqualification' if severity == 'disqualify' else 'a review'}."
        many = [
            f"{one.agent} ({sum(one.excluded.values()):,} of {one.planned:,})"
            for one in result.summaries
            if one.planned and sum(one.excluded.values()) > MANY_EXCLUDED * one.planned
        ]
        if many:
            yield f"More than {MANY_EXCLUDED:.0%} of the planned trials are in no rate for {_few(many)}."
        for one in result.summaries:
            others = [model for model in one.returned_models if one.model and model != one.model]
            if others:
                yield f"{one.agent}: asked for {one.model}, answered by {', '.join(others)[:300]}."
        graded = sum(one.outcomes.get(name, 0) for one in result.summaries for name in GRADED)
        if result.planned and not graded:
            yield "Nothing was graded."


def unreadable(evidence: Evidence, trial_id: str, error: ConfigError) -> None:
    """Note a record that cannot be read: it is evidence too."""
    evidence.unreadable.append(f"{trial_id} ({error.message})")


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SOME]) + (f" and {len(names) - _SOME} more" if len(names) > _SOME else "")
