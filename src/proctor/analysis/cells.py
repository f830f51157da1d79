"""A trials frame reduced to sums by agent, condition and task: all that aggregates are computed from.

This is the only place that sees every row. It is one streamed pass, so that millions of trials fit in little memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from proctor.analysis.faces import MEASURES, Measure
from proctor.analysis.frame import GRADED, OUTCOMES, PLAIN, TRIALS
from proctor.analysis.splits import HIDDEN, PUBLIC
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    import polars as pl
    from numpy.typing import NDArray

    from proctor.analysis.means import Codes, Floats

Dimension = Literal["capability", "difficulty", "domain", "split"]
DIMENSIONS: tuple[Dimension, ...] = ("capability", "difficulty", "domain", "split")
_AGENT = ["agent", "harness", "harness_version", "model"]
_TASK = ["task", "task_digest"]
_NEEDED = ["agent", "task", "condition", "outcome"]
_SETTING = {"image_digest": "image", "limits": "set of limits"}
_AMOUNTS = ["steps", "tool_calls", "prompt_tokens", "completion_tokens", "cost_usd", "wall_s", "cpu_s", "weight"]
_MOST = 2**53
"""More than this is no amount, and sums of it would not be exact."""
_FACTS = ["split", "weight", "difficulty", "domain", "cluster"]


@dataclass(frozen=True, slots=True)
class Suite:
    """The tasks of a frame, ordered by name and digest. Codes index the names beside them; -1 is not known."""

    names: tuple[str, ...]
    by_name: Codes
    """Equal for the versions (digests) of one task: a perturbed task is another version of it."""
    digests: tuple[str, ...]
    clusters: Codes
    cluster_names: tuple[str, ...]
    weights: Floats
    splits: tuple[str | None, ...]
    difficulties: tuple[str | None, ...]
    domains: tuple[str | None, ...]
    capabilities: tuple[tuple[str, ...], ...]
    groups: Mapping[Dimension, Mapping[str | None, NDArray[np.bool_]]]
    """Which tasks belong to each value of a dimension; None: it is not known. Empty when it is known of no task."""
    hidden: NDArray[np.bool_]
    """Tasks of the held-out side; `public` are those of the public one."""
    public: NDArray[np.bool_]
    hardness: Codes
    """Difficulties as codes; -1 is not known."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The sums of one agent under one condition: arrays over the tasks of the suite (zero where it has no trial)."""

    planned: Floats
    graded: Floats
    resolved: Floats
    score: Floats
    squares: Floats
    known: Mapping[Measure, Floats]
    """Graded trials whose value of a measure is known; `spent` is the sum of it, `won` how many were resolved."""
    spent: Mapping[Measure, Floats]
    won: Mapping[Measure, Floats]
    outcomes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AgentCells:
    """One agent: what it is, and its sums by condition."""

    name: str
    harness: str
    harness_version: str
    model: str | None
    returned_models: tuple[str, ...]
    conditions: Mapping[str, Cells] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reduced:
    """A whole frame, reduced."""

    suite: Suite
    agents: tuple[AgentCells, ...]
    notes: tuple[str, ...]


def reduce_trials(trials: pl.DataFrame | pl.LazyFrame) -> Reduced:
    """Check a frame and reduce it. Raises ConfigError (see `aggregate`)."""
    import polars as pl

    frame = trials.lazy()
    if lacking := TRIALS.keys() - frame.collect_schema().keys():
        raise ConfigError(f"the frame lacks {', '.join(sorted(lacking))}", field="trials")
    queries = [_checks(frame), _cells(frame), _tasks(frame), _models(frame)]
    try:
        checks, cells, tasks, models = pl.collect_all(queries, engine="streaming")
    except pl.exceptions.PolarsError as error:
        raise ConfigError(f"the trials cannot be read: {str(error).splitlines()[0]}", field="trials") from error
    _refuse(checks.row(0, named=True), frame)
    suite, notes = _suite(tasks)
    agents = tuple(_agents(cells, models, suite))
    return Reduced(suite, agents, (*notes, *_cautions(agents, suite)))


def check_trials(trials: pl.DataFrame | pl.LazyFrame, *, field: str = "trials") -> None:
    """Refuse rows that no honest number comes from: no score in [0, 1] where there is a verdict, an outcome that is not
    on the list, a trial that occurs twice. For those who compute from rows themselves. Raises ConfigError with `field`.
    """
    frame = trials.lazy()
    _refuse(_checks(frame).collect(engine="streaming").row(0, named=True), frame, field)


def _cautions(agents: Sequence[AgentCells], suite: Suite) -> Iterator[str]:
    """What makes numbers of several versions, or of several agents, less comparable than they look."""
    import numpy as np

    plain = [agent.conditions[PLAIN].planned > 0 for agent in agents if PLAIN in agent.conditions]
    if not plain:
        return
    asked = suite.by_name[np.logical_or.reduce(plain)]
    if versions := len(asked) - len(set(asked.tolist())):
        yield f"tasks in more than one version (digest): {versions}; each version counts as a task"
    if any((one != plain[0]).any() for one in plain):
        yield "the agents were not given the same tasks: their rates are about different exams (compare pairs by task)"


def _checks(frame: pl.LazyFrame) -> pl.LazyFrame:
    import polars as pl

    graded = pl.col("outcome").is_in(GRADED)
    nameless, never = pl.any_horizontal(pl.col(*_NEEDED).is_null()), pl.col("outcome") == "unrunnable"
    key = pl.struct("run_id", "trial_id").hash()
    return frame.select(
        pl.len().alias("rows"),
        key.n_unique().alias("trials"),
        (nameless | (pl.col("task_digest").is_null() & ~never)).sum().alias("nameless"),
        (~pl.col("outcome").is_in(OUTCOMES)).sum().alias("strange"),
        (graded & pl.col("score").is_between(0, 1).not_().fill_null(True)).sum().alias("unscored"),
        (~graded & pl.col("score").is_not_null()).sum().alias("overscored"),
        (~pl.all_horizontal(pl.col(*_AMOUNTS).is_between(0, _MOST).fill_null(True))).sum().alias("impossible"),
    )


def _refuse(checks: Mapping[str, Any], frame: pl.LazyFrame, field: str = "trials") -> None:
    import polars as pl

    if not checks["rows"]:
        raise ConfigError("there are no trials", field=field)
    for name, message in (
        ("nameless", "trials without agent, task, task_digest, condition or outcome: {}"),
        ("strange", "trials with an outcome that is not on the list: {}"),
        ("unscored", "graded trials without a score in [0, 1]: {}"),
        ("overscored", "trials with a score and no verdict: {}"),
        ("impossible", "trials with an amount or a weight that is negative or not a finite number: {}"),
    ):
        if checks[name]:
            raise ConfigError(message.format(checks[name]), field=field)
    if checks["trials"] != checks["rows"]:
        twice = frame.group_by("run_id", "trial_id").len().filter(pl.col("len") > 1).sort("run_id", "trial_id").head(1)
        for run, trial, count in twice.collect(engine="streaming").iter_rows():
            raise ConfigError(f"trial {trial} of run {run} occurs {count} times", field=field,
                              remedy="give each run once")  # fmt: skip


def _cells(frame: pl.LazyFrame) -> pl.LazyFrame:
    import polars as pl

    graded = pl.col("outcome").is_in(GRADED)
    won = pl.col("outcome") == "resolved"
    sums = [pl.len().alias("planned"), graded.sum().alias("graded"), pl.col("row").min()]
    sums += [(pl.col("outcome") == outcome).sum().alias(f"is {outcome}") for outcome in OUTCOMES]
    sums += [pl.col("score").sum(), (pl.col("score") ** 2).sum().alias("squares")]
    for measure in MEASURES:
        value = pl.when(graded).then(_measure(measure))
        sums += [
            value.count().alias(f"known {measure}"),
            value.sum().cast(pl.Float64).alias(f"spent {measure}"),
            (won & _measure(measure).is_not_null()).sum().alias(f"won {measure}"),
        ]
    return frame.with_row_index("row").group_by(*_AGENT, "condition", *_TASK).agg(sums)


def _measure(measure: Measure) -> pl.Expr:
    import polars as pl

    if measure == "tokens":  # unknown when a part of it is
        return pl.col("prompt_tokens") + pl.col("completion_tokens")
    return pl.col(measure)


def _tasks(frame: pl.LazyFrame) -> pl.LazyFrame:
    import polars as pl

    cluster = pl.col("cluster").fill_null(pl.col("task"))
    firsts = [pl.col(name).drop_nulls().first() for name in _FACTS if name != "cluster"]
    plain = pl.col("condition") == PLAIN
    differ = [(pl.col(name).min() != pl.col(name).max()).alias(f"differ {name}") for name in _FACTS]
    differ += [
        (pl.col(name).filter(plain).min() != pl.col(name).filter(plain).max()).alias(f"differ {name}")
        for name in _SETTING
    ]
    return (
        frame.with_columns(cluster)
        .group_by(_TASK)
        .agg(*firsts, pl.col("cluster").first(), pl.col("capabilities").first(), *differ)
    )


def _models(frame: pl.LazyFrame) -> pl.LazyFrame:
    import polars as pl

    return frame.select(*_AGENT, "returned_models").explode("returned_models").filter(
        pl.col("returned_models").is_not_null()
    ).unique()  # fmt: skip


def _suite(tasks: pl.DataFrame) -> tuple[Suite, list[str]]:
    import numpy as np

    tasks = tasks.sort(_TASK)
    notes = [
        f"tasks with more than one {name}: {differing}; the first that was read counts"
        for name in _FACTS
        if (differing := int(tasks[f"differ {name}"].sum() or 0))
    ]
    notes += [
        f"tasks run with more than one {what}: {differing}; trials that differ in it are counted together"
        for name, what in _SETTING.items()
        if (differing := int(tasks[f"differ {name}"].sum() or 0))
    ]
    names = tasks["task"].to_list()
    name_codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    cluster_names = sorted(set(tasks["cluster"].to_list()))
    index = {name: number for number, name in enumerate(cluster_names)}
    splits, difficulties, domains = (tuple(tasks[name].to_list()) for name in ("split", "difficulty", "domain"))
    capabilities = tuple(tuple(one or ()) for one in tasks["capabilities"].to_list())
    levels = {name: code for code, name in enumerate(sorted({name for name in difficulties if name is not None}))}
    suite = Suite(
        names=tuple(names),
        by_name=np.array([name_codes[name] for name in names], dtype=np.int64),
        digests=tuple(tasks["task_digest"].to_list()),
        clusters=np.array([index[name] for name in tasks["cluster"].to_list()], dtype=np.int64),
        cluster_names=tuple(cluster_names),
        weights=tasks["weight"].fill_null(1.0).to_numpy().astype(np.float64),
        splits=splits,
        difficulties=difficulties,
        domains=domains,
        capabilities=capabilities,
        groups={
            "capability": _masks([tuple(dict.fromkeys(one)) or (None,) for one in capabilities]),
            "difficulty": _masks([(one,) for one in difficulties]),
            "domain": _masks([(one,) for one in domains]),
            "split": _masks([(one,) for one in splits]),
        },
        hidden=np.array([one in HIDDEN for one in splits]),
        public=np.array([one == PUBLIC for one in splits]),
        hardness=np.array([-1 if one is None else levels[one] for one in difficulties], dtype=np.int64),
    )
    return suite, notes


def _masks(labels: Sequence[tuple[str | None, ...]]) -> dict[str | None, NDArray[np.bool_]]:
    import numpy as np

    members: dict[str | None, list[int]] = {}
    for task, of_task in enumerate(labels):
        for label in of_task:
            members.setdefault(label, []).append(task)
    if members.keys() <= {None}:
        return {}
    found = {}
    for name in sorted(members, key=lambda one: (one is None, one)):
        mask = np.zeros(len(labels), dtype=bool)
        mask[members[name]] = True
        found[name] = mask
    return found


def _agents(cells: pl.DataFrame, models: pl.DataFrame, suite: Suite) -> list[AgentCells]:
    import polars as pl

    returned: dict[tuple[Any, ...], list[str]] = {}
    for *identity, model in models.iter_rows():
        returned.setdefault(tuple(identity), []).append(model)
    order = {task: number for number, task in enumerate(zip(suite.names, suite.digests, strict=True))}
    place = pl.DataFrame({"task": [t for t, _ in order], "task_digest": [d for _, d in order]}).with_row_index("place")
    placed = cells.join(place, on=_TASK, how="left", nulls_equal=True)
    groups: dict[tuple[Any, ...], dict[str, Cells]] = {}
    firsts: dict[tuple[Any, ...], int] = {}
    for key, rows in placed.partition_by([*_AGENT, "condition"], as_dict=True).items():
        *identity, condition = key
        agent = tuple(identity)
        groups.setdefault(agent, {})[condition] = _sums(rows, len(suite.names))
        firsts[agent] = min(firsts.get(agent, 1 << 62), int(rows["row"].min()))  # type: ignore[arg-type]
    labels = [identity[0] for identity in groups]
    return [
        AgentCells(
            name=identity[0] if labels.count(identity[0]) == 1 else _full_name(identity),
            harness=identity[1] or "",
            harness_version=identity[2] or "",
            model=identity[3],
            returned_models=tuple(sorted(returned.get(identity, []))),
            conditions=dict(sorted(groups[identity].items(), key=lambda item: (item[0] != PLAIN, item[0]))),
        )
        for identity in sorted(groups, key=lambda agent: firsts[agent])
    ]


def _full_name(identity: tuple[Any, ...]) -> str:
    """A label that more than one agent was run under, told apart by harness, version and model."""
    label, harness, version, model = identity
    return f"{label} ({harness} {version}{f', {model}' if model else ''})"


def _sums(rows: pl.DataFrame, tasks: int) -> Cells:
    import numpy as np

    place = rows["place"].to_numpy()

    def over_tasks(column: str) -> Floats:
        found = np.zeros(tasks)
        found[place] = rows[column].to_numpy()
        return found

    return Cells(
        planned=over_tasks("planned"),
        graded=over_tasks("graded"),
        resolved=over_tasks("is resolved"),
        score=over_tasks("score"),
        squares=over_tasks("squares"),
        known={measure: over_tasks(f"known {measure}") for measure in MEASURES},
        spent={measure: over_tasks(f"spent {measure}") for measure in MEASURES},
        won={measure: over_tasks(f"won {measure}") for measure in MEASURES},
        outcomes={outcome: count for outcome in OUTCOMES if (count := int(rows[f"is {outcome}"].sum()))},
    )
