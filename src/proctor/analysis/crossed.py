"""Model x harness x task: what a crossed exam says about each, and how far to trust the order of them.

A harness can be what makes a model look good. Only an exam that runs several models in several harnesses at the same
tasks can tell; this is what it then has to say: the table of means, the components of variance, whether the order of
models changes with the harness, how firm every ranking is, and what a larger exam would bring.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

from proctor import __version__
from proctor.analysis.comparison import as_plain
from proctor.analysis.components import Components, Table, variance_components
from proctor.analysis.frame import GRADED
from proctor.analysis.means import Tasks, suite_mean
from proctor.analysis.ranks import Ranking, kendall, rank_stability
from proctor.analysis.reliability import DStudy, Exam, d_study, jackknife
from proctor.analysis.resample import Resampler, by_cluster
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from proctor.analysis.components import Method
    from proctor.analysis.logit import LogitModel
    from proctor.analysis.means import Floats
    from proctor.analysis.proportions import Interval
    from proctor.analysis.reliability import Object

FORMULAS: Mapping[str, str] = {
    "anova/balanced": "components from expected mean squares, all effects random",
    "henderson-1": "components that equate uncorrected sums of squares with their expectations (Henderson 1953)",
    "glmm/pql": "logistic mixed model by penalised quasi-likelihood (Breslow and Clayton 1993); interaction by twice "
    "the gain in Laplace likelihood against a half-half mixture of 0 and chi-squared(1) (Self and Liang 1987)",
    "reml": "restricted maximum likelihood, by statsmodels",
    "f/model-x-harness": "mean square of model x harness over that of model x harness x task (or the residual)",
    "rank/enumerated": "ranks over all C^C resamples of C clusters; ties share ranks, a shared first place is split",
    "rank/bootstrap": "the same over drawn resamples",
    "t/cluster": "t over clusters of tasks, C - 1 degrees of freedom (Miller 2024)",
    "reliability": "s_model / (s_model + s_mh/H + s_mt/T + s_mht/(HT) + s_residual/(HTK)); absolute: main effects of "
    "what was sampled count as error too (Brennan 2001)",
    "jackknife/clusters": "pseudo-values of log((1 - E) / E), each cluster of tasks left out in turn; t(C - 1) (Tukey "
    "1958); models and harnesses as they are",
    "kendall": "Kendall's tau-b",
}
"""What each formula id means, and where it is from."""
_MAY_TURN = 0.05
"""A pair whose order turns around in so large a share of the resamples is listed."""
_AGREE = ("task_digest", "image_digest", "limits")


@dataclass(frozen=True, slots=True)
class CellMean:
    """One model in one harness over its tasks; `interval` is cluster-robust over tasks, None with one."""

    model: str
    harness: str
    agent: str
    tasks: int
    trials: int
    mean: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Interaction:
    """Does it depend on the harness how much better one model is than another? For balanced tables, the F test of
    model x harness, over model x harness x task with repeated attempts, else over the residual, which holds that."""

    statistic: float
    df: tuple[int, int]
    p: float
    formula: str = "f/model-x-harness"


@dataclass(frozen=True, slots=True)
class Reversal:
    """Two models whose order differs between two harnesses. `chance` is the share of task resamples in which it does;
    `seen` says that it does in the data themselves."""

    first: str
    second: str
    harness: str
    other: str
    difference: float
    """First minus second in `harness`."""
    difference_other: float
    seen: bool
    chance: float


@dataclass(frozen=True, slots=True)
class Crossed:
    """Everything `proctor compare --crossed` says. Rankings are over the tasks that all ranked have; `ranks_within`
    ranks the models inside each harness, and `agreement` is Kendall's tau between the harnesses' rankings."""

    models: tuple[str, ...]
    harnesses: tuple[str, ...]
    tasks: int
    clusters: int
    trials: int
    left_out: Mapping[str, int]
    """Trials that are not in the table, by reason."""
    cells: tuple[CellMean, ...]
    missing: tuple[tuple[str, str], ...]
    """Combinations (model, harness) without a score."""
    components: Components | None
    interaction: Interaction | None
    ranks_models: Ranking | None
    ranks_agents: Ranking | None
    ranks_within: Mapping[str, Ranking]
    agreement: Mapping[str, float]
    """Harness | harness -> tau."""
    reversals: tuple[Reversal, ...]
    study: DStudy | None
    logit: LogitModel | None
    level: float
    seed: int
    resamples: int
    inputs: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The analysis as plain JSON values."""
        plain: dict[str, Any] = as_plain(asdict(self))
        return {"version": 1, "proctor_version": __version__, **plain, "formulas": dict(FORMULAS)}


@dataclass(frozen=True, slots=True)
class CrossedOptions:
    """How to analyse a crossing. `target` is the reliability that the D-study plans for."""

    level: float = 0.95
    seed: int = 0
    resamples: int = 4000
    target: float = 0.9
    method: Method = "anova"
    score: str = "score"
    logit: bool = False
    """Also fit the logistic mixed model, where scores are pass or fail; it takes seconds."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of what the trials were read from; kept beside the result."""


def crossed(trials: pl.DataFrame, options: CrossedOptions | None = None) -> Crossed:
    """Analyse the trials (condition `plain`) of agents that have a model. Raises RefusedError when a task differs in
    digest, image or limits, or two agents are the same model in the same harness; ConfigError without a score."""
    options = options or CrossedOptions()
    grid = _Grid.read(trials, options.score)
    notes: list[str] = []
    components, study = _study(grid, options, notes)
    within = {}
    for harness in grid.harnesses:
        ranking = _rank({m: grid.means.get((m, harness), {}) for m in grid.models}, grid, options)
        if ranking is not None:
            within[harness] = ranking
    agreement = {}
    for one, other in combinations(within, 2):
        means = [{system.label: system.mean for system in within[name].systems} for name in (one, other)]
        shared = sorted(means[0].keys() & means[1].keys())
        if len(shared) > 1:
            agreement[f"{one} | {other}"] = kendall(*([side[name] for name in shared] for side in means))
    if grid.missing:
        notes.append(f"{len(grid.missing)} of {len(grid.models) * len(grid.harnesses)} combinations were not run")
    return Crossed(
        models=grid.models,
        harnesses=grid.harnesses,
        tasks=len(grid.tasks),
        clusters=len({grid.clusters[task] for task in grid.tasks}),
        trials=len(grid.rows),
        left_out=grid.left_out,
        cells=grid.cell_means(options.level),
        missing=grid.missing,
        components=components,
        interaction=_interaction(components),
        ranks_models=_rank(grid.over_harnesses(), grid, options),
        ranks_agents=_rank({grid.agents[pair]: means for pair, means in grid.means.items()}, grid, options),
        ranks_within=within,
        agreement={pair: tau for pair, tau in agreement.items() if tau == tau},
        reversals=_reversals(grid, options),
        study=study,
        logit=_logit(grid, options, notes),
        level=options.level,
        seed=options.seed,
        resamples=options.resamples,
        inputs=dict(options.inputs),
        notes=tuple(notes),
    )


def _study(grid: _Grid, options: CrossedOptions, notes: list[str]) -> tuple[Components | None, DStudy | None]:
    table = grid.table()
    try:
        components = variance_components(table, method=options.method)
    except RefusedError as error:
        notes.append(f"no components of variance: {error.message}")
        return None, None
    pairs, tasks = len(grid.means), len(grid.tasks)
    attempts = max(1, round(len(grid.rows) / (pairs * tasks)))
    now = Exam(len(grid.harnesses), tasks, attempts, len(grid.models))
    kind: Object = "model" if len(grid.models) > 1 else "harness"
    if len(grid.models) < 2 and len(grid.harnesses) < 2:
        return components, None
    if len(grid.harnesses) == 1 and kind == "model":
        notes.append("one harness: what is the model's and what is the harness's liking for it cannot be told apart")
    if len(set(grid.clusters.values())) < len(grid.tasks):
        notes.append("tasks come in clusters: their component holds that of clusters, and more tasks of the same ones "
                     "would bring less than is said here")  # fmt: skip
    clusters = [grid.clusters[row[2]] for row in grid.rows]
    interval = jackknife(table, clusters, now, object=kind, level=options.level)
    return components, d_study(components, now, object=kind, target=options.target, interval=interval)


def _logit(grid: _Grid, options: CrossedOptions, notes: list[str]) -> LogitModel | None:
    if not options.logit:
        return None
    from proctor.analysis.logit import fit_logit

    try:
        return fit_logit(grid.table())
    except RefusedError as error:
        notes.append(f"no components on the logit: {error.message}")
        return None


@dataclass(frozen=True, slots=True)
class _Grid:
    """The graded scores of a frame by model, harness and task."""

    rows: tuple[tuple[str, str, str, float], ...]
    models: tuple[str, ...]
    harnesses: tuple[str, ...]
    tasks: tuple[str, ...]
    clusters: Mapping[str, str]
    agents: Mapping[tuple[str, str], str]
    means: Mapping[tuple[str, str], Mapping[str, float]]
    """(model, harness) -> task -> mean over attempts."""
    left_out: Mapping[str, int]

    @classmethod
    def read(cls, trials: pl.DataFrame, score: str) -> _Grid:
        import polars as pl

        kept, left_out = _kept(trials)
        if kept.is_empty():
            raise ConfigError("no graded trial of an agent with a model", field="trials",
                              remedy="a crossing is of models and harnesses; " + _listed(left_out))  # fmt: skip
        _check(kept)
        value = (pl.col("outcome") == "resolved").cast(pl.Float64) if score == "resolved" else pl.col("score")
        kept = kept.with_columns(value.alias("value"), _harness_names(kept))
        agents = _agents(kept)
        columns = kept.select("model", "level", "task", "value").rows()
        sums: dict[tuple[str, str], dict[str, list[float]]] = {}
        for model, harness, task, one in columns:
            sums.setdefault((model, harness), {}).setdefault(task, []).append(one)
        known = dict(kept.select("task", pl.coalesce("cluster", "task")).unique(maintain_order=True).rows())
        return cls(
            rows=tuple(columns),
            models=tuple(sorted({row[0] for row in columns})),
            harnesses=tuple(sorted({row[1] for row in columns})),
            tasks=tuple(sorted({row[2] for row in columns})),
            clusters=known,
            agents=agents,
            means={pair: {task: sum(one) / len(one) for task, one in found.items()}
                   for pair, found in sorted(sums.items())},
            left_out=left_out,
        )  # fmt: skip

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        return tuple((m, h) for m in self.models for h in self.harnesses if (m, h) not in self.means)

    def table(self) -> Table:
        rows = [{"model": model, "harness": harness, "task": task} for model, harness, task, _ in self.rows]
        return Table.of(rows, [row[3] for row in self.rows])

    def over_harnesses(self) -> dict[str, dict[str, float]]:
        """Each model's mean over harnesses, at tasks it has in every harness that any model was run in."""
        found: dict[str, dict[str, float]] = {}
        for model in self.models:
            sides = [self.means.get((model, harness)) for harness in self.harnesses]
            if all(side is not None for side in sides):
                whole = [side for side in sides if side is not None]
                shared = set.intersection(*(set(side) for side in whole))
                found[model] = {task: sum(side[task] for side in whole) / len(whole) for task in shared}
        return found

    def cell_means(self, level: float) -> tuple[CellMean, ...]:
        by_pair: dict[tuple[str, str], dict[str, list[float]]] = {}
        for model, harness, task, one in self.rows:
            by_pair.setdefault((model, harness), {}).setdefault(task, []).append(one)
        cells = []
        for (model, harness), scores in sorted(by_pair.items()):
            tasks = sorted(scores)
            found = suite_mean(Tasks.of([scores[task] for task in tasks], [self.clusters[task] for task in tasks]),
                               level=level)  # fmt: skip
            trials = sum(map(len, scores.values()))
            cells.append(CellMean(model, harness, self.agents[model, harness], len(tasks), trials, found.mean,
                                  found.clustered))  # fmt: skip
        return tuple(cells)


def _kept(trials: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """The trials of the table, and how many are left out for which reason."""
    import polars as pl

    reason = (
        pl.when(pl.col("model").is_null())
        .then(pl.lit("no model"))
        .when(pl.col("condition") != "plain")
        .then(pl.lit("another condition than plain"))
        .when(~pl.col("outcome").is_in(GRADED))
        .then(pl.col("outcome"))
        .otherwise(None)
    )
    marked = trials.with_columns(reason.alias("reason"))
    counts = Counter(marked["reason"].drop_nulls().to_list())
    return marked.filter(pl.col("reason").is_null()), dict(sorted(counts.items()))


def _check(kept: pl.DataFrame) -> None:
    import polars as pl

    varied = kept.group_by("task").agg(pl.col(name).drop_nulls().n_unique() for name in _AGREE)
    for name in _AGREE:
        tasks = varied.filter(pl.col(name) > 1)["task"].sort().to_list()
        if tasks:
            raise RefusedError(f"not comparable: more than one {name} at {tasks[0]}", field="trials",
                               remedy="run every model and harness under the same terms")  # fmt: skip


def _harness_names(kept: pl.DataFrame) -> pl.Expr:
    """A harness in two versions is two harnesses."""
    import polars as pl

    versions = kept.group_by("harness").agg(pl.col("harness_version").n_unique().alias("n"))
    several = versions.filter(pl.col("n") > 1)["harness"].to_list()
    both = pl.concat_str("harness", pl.col("harness_version").fill_null("?"), separator=" ")
    return pl.when(pl.col("harness").is_in(several)).then(both).otherwise(pl.col("harness")).alias("level")


def _agents(kept: pl.DataFrame) -> dict[tuple[str, str], str]:
    agents: dict[tuple[str, str], str] = {}
    for model, harness, agent in kept.select("model", "level", "agent").unique(maintain_order=True).rows():
        if agents.setdefault((model, harness), agent) != agent:
            raise RefusedError(f"{agents[model, harness]} and {agent} are both {model} in {harness}", field="trials",
                               remedy="analyse the two configurations apart")  # fmt: skip
    return agents


def _rank(means: Mapping[str, Mapping[str, float]], grid: _Grid, options: CrossedOptions) -> Ranking | None:
    """Rank at the tasks that all have; None when there are not two systems or no such task."""
    systems = {label: scores for label, scores in means.items() if scores}
    if len(systems) < 2:
        return None
    shared = sorted(set.intersection(*(set(scores) for scores in systems.values())))
    if not shared:
        return None
    return rank_stability(
        {label: [scores[task] for task in shared] for label, scores in systems.items()},
        [grid.clusters[task] for task in shared],
        level=options.level, resamples=options.resamples, seed=options.seed,
    )  # fmt: skip


def _interaction(components: Components | None) -> Interaction | None:
    if components is None or not components.balanced:
        return None
    names = {one.name: one for one in components.components}
    own, error = names.get("model x harness"), names["residual"]
    rest = names.get("model x harness x task", error)
    if own is None or own.mean_square is None or not rest.mean_square or own.df is None or rest.df is None:
        return None
    from scipy.stats import f

    statistic = own.mean_square / rest.mean_square
    return Interaction(statistic, (own.df, rest.df), float(f.sf(statistic, own.df, rest.df)))


def _reversals(grid: _Grid, options: CrossedOptions) -> tuple[Reversal, ...]:
    """Pairs of models and pairs of harnesses whose order is reversed, or is in a twentieth of the resamples."""
    import numpy as np

    # Quadruples at the same tasks see the same draws, so they are drawn once.
    at_tasks: dict[tuple[str, ...], list[tuple[str, str, str, str]]] = {}
    for first, second in combinations(grid.models, 2):
        for harness, other in combinations(grid.harnesses, 2):
            sides = [grid.means.get((m, h), {}) for h in (harness, other) for m in (first, second)]
            if shared := set.intersection(*(set(side) for side in sides)):
                at_tasks.setdefault(tuple(sorted(shared)), []).append((first, second, harness, other))
    found = []
    for tasks, quadruples in at_tasks.items():
        columns = [
            [grid.means[first, where][task] - grid.means[second, where][task] for task in tasks]
            for first, second, *harnesses in quadruples
            for where in harnesses
        ]
        differences = np.array(columns).T
        draws = _resampled(differences, [grid.clusters[task] for task in tasks], options)
        for index, quadruple in enumerate(quadruples):
            here, there = (float(one) for one in differences[:, 2 * index : 2 * index + 2].mean(axis=0))
            chance = float((draws[:, 2 * index] * draws[:, 2 * index + 1] < -1e-12).mean())
            if here * there < 0 or chance >= _MAY_TURN:
                found.append(Reversal(*quadruple, here, there, here * there < 0, chance))
    return tuple(sorted(found, key=lambda one: (not one.seen, -one.chance)))


def _resampled(values: Floats, clusters: Sequence[str], options: CrossedOptions) -> Floats:
    import numpy as np

    names = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    codes = np.array([names[name] for name in clusters])
    sums = by_cluster(values, codes, len(names))
    sizes = np.repeat(np.bincount(codes).astype(float)[:, None], values.shape[1], axis=1)
    return Resampler(len(names), options.resamples, options.seed).ratios(sums, sizes)


def _listed(counts: Mapping[str, int]) -> str:
    return "left out: " + (", ".join(f"{count} {reason}" for reason, count in counts.items()) or "nothing")
