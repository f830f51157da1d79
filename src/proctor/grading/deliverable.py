"""What crosses from the candidate's sandbox into the clean room."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.grading.contract import GradeFinding
    from proctor.sandbox.contract import Layer, Sandbox
    from proctor.tasks.model import CarryKind


@dataclass(frozen=True, slots=True)
class FileState:
    """A file or link as plain data. `mode` is 0o644, 0o755 or 0o120000 (a link, whose target is `data`)."""

    mode: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """One path, relative to the repository or absolute, before and after. None: it does not exist."""

    path: str
    before: FileState | None
    after: FileState | None


@dataclass(frozen=True, slots=True)
class Collected:
    """What was taken from a candidate, with everything that was left behind and why.

    `patch` is the text of a diff; `changes` are the same as exact states when they were collected from a sandbox
    (a prediction has none). `layer` is the frozen upper for `filesystem`, `box` the candidate's own sandbox for
    `live`.
    """

    kind: CarryKind
    patch: str | None = None
    changes: tuple[Change, ...] | None = None
    layer: Layer | None = None
    box: Sandbox | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[GradeFinding, ...] = ()
    misplaced: tuple[tuple[str, Change], ...] = ()
    """Files that look like what was asked for and lie elsewhere: where they are, and what they would be."""
    problem: str = ""
    """Why nothing could be taken although the machinery worked (too large, too many files): unresolved."""

    @property
    def is_empty_prediction(self) -> bool:
        """Whether this is a prediction without a patch; such a one is never run."""
        return self.kind == "patch" and self.changes is None and not (self.patch or "").strip()

    @classmethod
    def from_patch(cls, text: str) -> Collected:
        """A patch made elsewhere, such as `model_patch` of a prediction."""
        return cls(kind="patch", patch=text, summary={"patch_bytes": len(text.encode("utf-8", "surrogateescape"))})

    def with_findings(self, *findings: GradeFinding) -> Collected:
        """The same with more findings."""
        return replace(self, findings=(*self.findings, *findings))


Reason = Literal["system", "shadow", "special", "bytecode", "startup", "test-config", "verifier", "link", "size", "git"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A path that was not carried."""

    path: str
    reason: Reason
    detail: str = ""


def dropped_findings(dropped: list[Dropped]) -> list[GradeFinding]:
    """One note for each reason: how many paths were not carried, and the first of them by name."""
    from proctor.grading.contract import GradeFinding

    by_reason: dict[str, list[Dropped]] = {}
    for one in dropped:
        by_reason.setdefault(one.reason, []).append(one)
    return [
        GradeFinding(
            "not-carried",
            f"{reason}: {len(found)} paths, " + ", ".join(f"{d.path} {d.detail}".strip() for d in found[:5]),
        )
        for reason, found in by_reason.items()
    ]


MAX_LISTED = 200


def listing(dropped: list[Dropped]) -> dict[str, Any]:
    """Dropped paths for the record: all counts, and the first paths by name."""
    counts: dict[str, int] = {}
    for one in dropped:
        counts[one.reason] = counts.get(one.reason, 0) + 1
    return {"counts": counts, "paths": [f"{one.path} ({one.reason})" for one in dropped[:MAX_LISTED]]}
