"""Would another exam rank them the same? Generalizability theory (Cronbach 1972; Brennan 2001) from components.

The *object* is what is to be told apart: models, harnesses, or agents (a model in a harness). Everything else is a
*facet* that was sampled: other tasks, other harnesses, other attempts could have been drawn. A facet's number divides
the components it is in, so more of it helps, but only until the components without it remain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proctor.analysis.components import FACTORS, variance_components
from proctor.analysis.proportions import Interval
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proctor.analysis.components import Components, Table

Object = Literal["model", "harness", "agent"]
_OBJECTS: dict[Object, frozenset[str]] = {
    "model": frozenset({"model"}),
    "harness": frozenset({"harness"}),
    "agent": frozenset({"model", "harness"}),
}
TASKS = (10, 20, 50, 100, 200, 500, 1000)
ATTEMPTS = (1, 3, 5)
HARNESSES = (1, 2, 3, 5, 7)
FEWEST_CLUSTERS = 5
"""With fewer clusters of tasks a jackknife knows nothing of how they vary."""
_MOST_CELLS = 3_000_000
_MOST_TASKS = 1_000_000


@dataclass(frozen=True, slots=True)
class Exam:
    """A design: so many models, harnesses, tasks, and attempts at each combination."""

    harnesses: int = 1
    tasks: int = 1
    attempts: int = 1
    models: int = 1

    @property
    def trials(self) -> int:
        """Trials for each object (the object's own factor counts once)."""
        return self.harnesses * self.tasks * self.attempts

    def size(self, factor: str) -> int:
        """How many levels of a factor are averaged over."""
        return {"model": self.models, "harness": self.harnesses, "task": self.tasks}[factor]


@dataclass(frozen=True, slots=True)
class Reliability:
    """The reliability of an exam. `relative` (E rho²) is for ranking: the expected squared correlation of the mean
    scores with those over all tasks and harnesses. `absolute` (Phi) is for the number itself: the main effects of
    what was sampled count as error too. Both None when the objects do not vary. `ceiling` is `relative` with endless
    tasks: what no number of tasks can pass."""

    exam: Exam
    relative: float | None
    absolute: float | None
    ceiling: float | None


@dataclass(frozen=True, slots=True)
class DStudy:
    """What other designs would give (a decision study). `needed` holds, for each number of harnesses and attempts,
    the smallest number of tasks that reaches `target`, or None for tasks when none does."""

    object: Object
    target: float
    now: Reliability
    interval: Interval | None
    """Of `now.relative`, over other tasks like these; models and harnesses are taken as they are. None when there are
    too few clusters of tasks, or too many rows to leave each out."""
    grid: tuple[Reliability, ...]
    needed: tuple[tuple[int, int, int | None], ...]
    """(harnesses, attempts, tasks)."""


def reliability(components: Components, exam: Exam, *, object: Object = "model") -> Reliability:
    """The reliability that an exam has for an object, given the components."""
    own = _OBJECTS[object]
    for name in ("harnesses", "tasks", "attempts", "models"):
        if getattr(exam, name) < 1:
            raise ConfigError(f"{getattr(exam, name)} is not a number of {name}", field=name, remedy="1 or more")
    true = relative = absolute = endless = 0.0
    for one in components.components:
        factors = frozenset(one.effect) or frozenset(FACTORS)
        if factors <= own:
            true += one.value
            continue
        share = one.value / math.prod(exam.size(name) for name in factors - own)
        # What repeats within a cell is averaged over attempts; without repeats the residual may hold the interaction
        # of everything, which they do not make smaller. That it shrinks is then an assumption, and is not made.
        if not one.effect and components.repeated:
            share /= exam.attempts
        absolute += share
        if factors & own:
            relative += share
            endless += 0.0 if "task" in factors else share
    if true <= 0:
        return Reliability(exam, None, None, None)
    return Reliability(exam, true / (true + relative), true / (true + absolute), true / (true + endless))


def jackknife(
    table: Table, clusters: Sequence[str], exam: Exam, *, object: Object = "model", level: float = 0.95
) -> Interval | None:
    """The interval of an exam's relative reliability when each cluster of tasks is left out in turn (Tukey 1958).

    `clusters` has the cluster of each score. Estimate and error are those of the pseudo-values of log((1 - E) / E), so
    that the interval stays within 0 and 1; t with C - 1 degrees of freedom. None where it cannot be had.
    """
    import numpy as np
    from scipy.stats import t

    names = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    count = len(names)
    if count < FEWEST_CLUSTERS or count * len(table.scores) > _MOST_CELLS:
        return None
    codes = np.array([names[name] for name in clusters])
    whole = reliability(variance_components(table), exam, object=object).relative
    found = []
    for left_out in range(count):
        try:
            components = variance_components(table.only(codes != left_out))
        except RefusedError:
            return None
        found.append(reliability(components, exam, object=object).relative)
    known = [one for one in (whole, *found) if one is not None and 0 < one < 1]
    if len(known) <= count:  # an estimate at the edge: the objects do not differ, or nothing else does
        return None
    logits = np.log((1 - np.array(known)) / np.array(known))
    pseudo = count * logits[0] - (count - 1) * logits[1:]
    half = float(t.ppf((1 + level) / 2, count - 1)) * float(pseudo.std(ddof=1)) / math.sqrt(count)
    middle = float(pseudo.mean())
    ends = [1 / (1 + math.exp(min(700.0, middle + sign * half))) for sign in (1, -1)]
    return Interval(known[0], ends[0], ends[1], level, "jackknife/clusters")


def d_study(
    components: Components,
    now: Exam,
    *,
    object: Object = "model",
    target: float = 0.9,
    harnesses: Sequence[int] = (),
    tasks: Sequence[int] = TASKS,
    attempts: Sequence[int] = ATTEMPTS,
    interval: Interval | None = None,
) -> DStudy:
    """Reliability over a grid of designs, and the tasks that each number of harnesses and attempts needs.

    Without repeated attempts the grid has one attempt only, and with one harness in the data one harness only: what
    more of them would do cannot be known.
    """
    if not 0 < target < 1:
        raise ConfigError(f"{target} is not a reliability", field="target", remedy="a number between 0 and 1")
    own = _OBJECTS[object]
    sampled = "harness" not in own and any("harness" in one.effect for one in components.components)
    several = (tuple(harnesses) or tuple(sorted({*HARNESSES, now.harnesses}))) if sampled else (now.harnesses,)
    repeats = tuple(attempts) if components.repeated else (1,)
    exams = [Exam(h, t, k, now.models) for h in several for k in repeats for t in tasks]
    needed = [(h, k, _tasks(components, Exam(h, 1, k, now.models), object, target)) for h in several for k in repeats]
    return DStudy(
        object=object,
        target=target,
        now=reliability(components, now, object=object),
        interval=interval,
        grid=tuple(reliability(components, exam, object=object) for exam in exams),
        needed=tuple(needed),
    )


def _tasks(components: Components, exam: Exam, object: Object, target: float) -> int | None:
    """The smallest number of tasks that reaches the target, by bisection: reliability grows with tasks."""

    def reached(tasks: int) -> bool:
        found = reliability(components, Exam(exam.harnesses, tasks, exam.attempts, exam.models), object=object)
        return found.relative is not None and found.relative >= target - 1e-12

    if not reached(_MOST_TASKS):
        return None
    low, high = 0, _MOST_TASKS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
