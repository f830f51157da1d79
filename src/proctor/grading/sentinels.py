"""Sentinels: tests with random names, added at grading time, whose outcome is known beforehand.

Graded code that makes tests pass wholesale (a patched report class, a hook that rewrites outcomes, a test runner
that was replaced) makes them pass too. Names are put together from words of the expected ids, so that code
which has not seen the real tests cannot tell a sentinel from one of them.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = re.compile(r"[A-Za-z]{3,}")
_SELDOM_WORDS = tuple(
    re.findall(
        r"\w+",
        """
    abrupt adjacent aligned ample balanced blended bounded brief chained clipped coarse compact coupled covered crossed
    curved damped delayed dense detached diverted doubled drained dropped eager elapsed enclosed exposed faded farthest
    folded foreign fractional gathered genuine gradual guarded halved hollow idle indented interleaved inverted joined
    jumbled layered leftover lingering looped loose mirrored mutual nearest narrow notched obsolete offset outermost
    padded paired partial pending perpetual plausible pruned quiet rounded scattered settled shifted shuffled skewed
    sparse split staggered stale steady stretched surplus swapped tangled tapered terse tilted trailing twofold uneven
    unequal untouched upright vacant vanishing wavering widened woven wrapped yielding
    """,
    )
)
"""Words that a name of a test may well have. No real name has two of them beside words of this very project: a name
of ours that is also the name of a real test would convict honest work."""
_MAX_DECOYS = 256


@dataclass(frozen=True, slots=True)
class SentinelPlan:
    """The names of one run. `must_pass` and `must_fail` are a pair outside the repository; `decoys` stand
    beside real tests and must not pass."""

    module: str
    case: str
    must_pass: str
    must_fail: str
    decoys: tuple[str, ...]

    def wire(self) -> dict[str, Any]:
        """The form in which the test process reads it."""
        return {
            "module": self.module,
            "case": self.case,
            "pass": self.must_pass,
            "fail": self.must_fail,
            "decoys": list(self.decoys),
        }


def plan_sentinels(expected: Sequence[str]) -> SentinelPlan:
    """Fresh names that no expected id contains. One decoy for each module and class that could hold a test."""
    words = sorted({w.lower() for test_id in expected for w in _WORD.findall(test_id.rpartition("::")[2])})
    pool = [word for word in words if word != "test"] or list(_SELDOM_WORDS)
    taken = set(_identifiers(expected))
    containers = {re.split(r"::[^:\[]*(\[|$)|\.[^.]*$", test_id)[0] for test_id in expected}
    count = min(_MAX_DECOYS, 2 * len(containers) + 8)
    random = secrets.SystemRandom()
    names: list[str] = []
    while len(names) < count + 3:
        chosen = [*random.choices(pool, k=random.randint(1, 2)), *random.sample(_SELDOM_WORDS, 2)]
        random.shuffle(chosen)
        name = "test_" + "_".join(chosen)
        if name not in taken:
            taken.add(name)
            names.append(name)
    module, must_pass, must_fail, *decoys = names
    case = "".join(part.title() for part in module.split("_")[1:]) + "Tests"
    return SentinelPlan(module, case, must_pass, must_fail, tuple(decoys))


def _identifiers(expected: Sequence[str]) -> list[str]:
    return [name for test_id in expected for name in re.findall(r"\w+", test_id)]
