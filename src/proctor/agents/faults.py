"""Tools that fail on purpose: a share of an agent's tool calls fails, hangs or answers in part, by a seeded draw.

What was injected is on record as such, so that it is never taken for the agent's mistake or for a fault of the
machinery. The draw depends on the trial's seed and the number of the call alone: it is the same again when the trial is
repeated, and for every agent that is compared.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from proctor.common import ConfigError
from proctor.sandbox.contract import EndReason, ExecResult, FileError, Output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Fault = Literal["fail", "timeout", "truncate"]
FAULTS: tuple[Fault, ...] = ("fail", "timeout", "truncate")
HANG_S = 2.0
"""How long an injected time-out makes the agent wait, at most: the whole limit of a call would only burn the budget."""
_KEPT_SHARE = 0.2
_FAILED = b"the tool did not respond, nothing was done; try again\n"


@dataclass(frozen=True, slots=True)
class ToolFaults:
    """What share of the calls goes wrong, and how (each kind as often as the others).

    fail: the call is not made, and says so. timeout: it is not made, and comes back as timed out after HANG_S.
    truncate: it is made, and the middle of its output is missing (commands only; a file operation fails instead).
    """

    rate: float
    kinds: tuple[Fault, ...] = FAULTS

    def draw(self, seed: int, number: int) -> Fault | None:
        """What happens to call number `number` of a trial with this seed; None: nothing."""
        source = random.Random(f"proctor-tool-faults-1:{seed}:{number}")
        return source.choice(self.kinds) if source.random() < self.rate else None

    def as_json(self) -> dict[str, Any]:
        """As the lock of a run holds it."""
        return {"rate": self.rate, "kinds": list(self.kinds)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ToolFaults:
        """From a lock."""
        return cls(value["rate"], tuple(value["kinds"]))

    @classmethod
    def parse(cls, text: str) -> ToolFaults:
        """`0.2` or `0.2:fail,truncate`. Raises ConfigError."""
        number, _, names = text.partition(":")
        kinds = tuple(name.strip() for name in names.split(",")) if names else FAULTS
        try:
            rate = float(number)
        except ValueError as error:
            raise ConfigError(f"{number!r} is not a number", field="--tool-faults", remedy="like 0.2:fail") from error
        if not 0 < rate <= 1:
            raise ConfigError(f"a rate of {number} is not in (0, 1]", field="--tool-faults", remedy="like 0.2:fail")
        for kind in kinds:
            if kind not in FAULTS:
                raise ConfigError(f"{kind!r} is no fault of a tool", field="--tool-faults",
                                  remedy=f"of {', '.join(FAULTS)}")  # fmt: skip
        if len(set(kinds)) < len(kinds):
            raise ConfigError("names one kind twice", field=f"--tool-faults {text}")
        return cls(rate, kinds)  # type: ignore[arg-type]


def not_made(fault: Fault, argv: Sequence[str], waited_s: float) -> ExecResult:
    """What a command that was not run comes back as."""
    timed_out = fault == "timeout"
    return ExecResult(
        argv=tuple(argv),
        exit_code=None if timed_out else 1,
        signal=9 if timed_out else None,
        stdout=Output(),
        stderr=Output(head=b"" if timed_out else _FAILED),
        timed_out=timed_out,
        reason=EndReason.EXEC_TIMEOUT if timed_out else None,
        duration_s=waited_s,
    )


def refused(path: str) -> FileError:
    """What a file operation that was not made raises."""
    return FileError(_FAILED.decode().strip(), errno=errno.EIO, path=path)


def cut(output: Output) -> Output:
    """The first fifth of an output and the count of what is missing; an empty or tiny one is left whole."""
    keep = int(output.total * _KEPT_SHARE)
    if output.total < 2 or keep >= len(output.head) + len(output.tail):
        return output
    head = output.head[: max(1, keep)]
    return Output(head=head, dropped=output.total - len(head))
