"""What a check of the self-test is, what it may look at, and what it says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from proctor.sandbox.box import Box
    from proctor.sandbox.contract import Runtime
    from proctor.sandbox.edge import Edge
    from proctor.sandbox.selftest.facts import Facts

Status = Literal["green", "red", "n/a"]

REFUSED: Final = frozenset(
    {"EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EPFNOSUPPORT", "signal 31"}
)
"""Answers to an attempt that was refused as such. Others (EINVAL, EFAULT, EBADF) say that it was carried out."""

NO_WAY: Final = frozenset({"ENETUNREACH", "EHOSTUNREACH", "EAFNOSUPPORT", "EPERM", "EACCES", "EADDRNOTAVAIL"})
"""Answers of a kernel that has no way to an address."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check says, and by what it knows."""

    status: Status
    evidence: str


def green(evidence: str) -> Verdict:
    """All is as it must be."""
    return Verdict("green", evidence)


def red(evidence: str) -> Verdict:
    """Something is possible that must not be."""
    return Verdict("red", evidence)


def not_applicable(reason: str) -> Verdict:
    """It does not apply to this sandbox; the reason says why."""
    return Verdict("n/a", reason)


def judge(wrong: Mapping[str, str] | list[str], otherwise: str) -> Verdict:
    """Red with what is wrong, if anything is; else green with `otherwise` as evidence."""
    if not wrong:
        return green(otherwise)
    shown = [f"{key}: {value}" for key, value in wrong.items()] if isinstance(wrong, Mapping) else list(wrong)
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return red("; ".join(shown[:4]) + more)


@dataclass(frozen=True, slots=True)
class View:
    """What the host knows of a sandbox, to hold against what the probe reports."""

    runtime: Runtime = "native"
    network: Literal["none", "carried", "open"] = "none"
    capabilities: int = 0
    """The set that root inside may have."""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Those of the host, as `/proc/self/ns` names them."""
    host_ids: tuple[int, ...] | None = None
    """The ids on the machine of a process of the sandbox; None where that cannot be seen."""
    secrets: tuple[str, ...] = ()
    """Texts that nothing inside may show, such as paths of the machine."""
    mounts: tuple[str, ...] = ()
    """Targets of the caller's own mounts: the names of their sources are theirs to show."""
    cpus: float | None = None
    hostname: str | None = None
    as_root: bool = True


FactCheck = Callable[["Facts", View], Verdict]
"""Judges one report of the probe: the checks of the short form."""


@dataclass(frozen=True, slots=True)
class Hall:
    """Where a live check makes its sandboxes."""

    edge: Edge
    runtime: Runtime
    image: str
    spec: Callable[..., Any]
    """A small spec of the runtime under test, with some fields changed."""
    place: Callable[[Box], Awaitable[str]]
    """Puts the probe into a sandbox; its path there."""


LiveCheck = Callable[[Hall], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the result: an item of the checklist, what became of it, and the evidence."""

    number: int
    title: str
    status: Status
    evidence: str
