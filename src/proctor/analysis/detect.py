"""`detect_drift`: from the behaviours of two versions to what has changed, in numbers and in sentences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from proctor.analysis.drift import Divergence, Drift, DriftOptions, Novelty, Shift, TaskChange, ToolChange, Verdict
from proctor.analysis.sequences import common_prefix, distances
from proctor.analysis.shifts import Pool, all_shifts
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proctor.analysis.behaviour import Action, Behaviour

_AGREE = {
    "task_digest": "another content of the task",
    "image_digest": "another image",
    "limits": "other limits",
    "condition": "another condition",
}
_SHOWN = 3
_TYPICAL_RUNS = 12
"""The most typical run is looked for among so many of a version's runs at a task."""


def detect_drift(
    baseline: Sequence[Behaviour],
    new: Sequence[Behaviour],
    options: DriftOptions | None = None,
    *,
    names: tuple[str, str] | None = None,
    inputs: Mapping[str, str] | None = None,
) -> Drift:
    """Compare two versions of an agent, within the tasks that both were run at.

    Raises RefusedError when a task was not the same for both (content, image, limits, condition): that is no drift.
    ConfigError when there is no task with runs of both.
    """
    options = options or DriftOptions()
    pools, unpaired = _pools(baseline, new)
    shifts, notes = all_shifts(pools, options)
    novelties = _novelties([run for pool in pools for run in pool.baseline], [r for p in pools for r in p.new])
    tools = _tools(pools)
    changes = tuple(_task_change(pool) for pool in pools)
    scores = [(change.baseline_score, change.new_score) for change in changes]
    known = [(one, other) for one, other in scores if one is not None and other is not None]
    same = all(abs(one - other) < 1e-12 for one, other in known) if known else None
    if unpaired:
        notes.append(f"{len(unpaired)} tasks have runs of one version only and are left out")
    labels = names or (pools[0].baseline[0].agent, pools[0].new[0].agent)
    return Drift(
        baseline=labels[0],
        new=labels[1],
        verdict=_overall(shifts, novelties),
        shifts=tuple(shifts),
        novelties=novelties,
        divergences=tuple(_divergences(pools)),
        tools=tools,
        by_task=changes,
        tasks=len(pools),
        clusters=len({pool.cluster for pool in pools}),
        runs=(sum(len(pool.baseline) for pool in pools), sum(len(pool.new) for pool in pools)),
        unpaired=tuple(unpaired),
        score=(_mean([one for one, _ in known]), _mean([other for _, other in known])),
        same_result=same,
        findings=tuple(_findings(shifts, novelties, tools, same)),
        level=options.level,
        alpha=options.alpha,
        seed=options.seed,
        draws=options.draws,
        inputs=dict(inputs or {}),
        notes=tuple(notes),
    )


def _pools(baseline: Sequence[Behaviour], new: Sequence[Behaviour]) -> tuple[list[Pool], list[str]]:
    sides: list[dict[str, list[Behaviour]]] = []
    for runs in (baseline, new):
        by_task: dict[str, list[Behaviour]] = {}
        for run in runs:
            by_task.setdefault(run.task, []).append(run)
        sides.append(by_task)
    shared = sorted(sides[0].keys() & sides[1].keys())
    if not shared:
        raise ConfigError("no task has runs of both versions", field="A B", remedy="run both at the same tasks")
    pools, problems = [], []
    for task in shared:
        runs = [*sides[0][task], *sides[1][task]]
        for name, what in _AGREE.items():
            if len({getattr(run, name) for run in runs} - {None}) > 1:
                problems.append(f"{what} at {task}")
        pools.append(Pool(task, runs[0].cluster or task, tuple(sides[0][task]), tuple(sides[1][task])))
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise RefusedError(f"not comparable: {'; '.join(problems[:_SHOWN])}{more}", field="A B",
                           remedy="what differs is not the agent; run both under the same terms")  # fmt: skip
    return pools, sorted(sides[0].keys() ^ sides[1].keys())


def _overall(shifts: Sequence[Shift], novelties: Sequence[Novelty]) -> Verdict:
    verdicts = [shift.verdict for shift in shifts if shift.gated]
    if "fail" in verdicts or any(novelty.alert for novelty in novelties):
        return "fail"
    return "pass" if verdicts and set(verdicts) == {"pass"} else "inconclusive"


def _novelties(baseline: Sequence[Behaviour], new: Sequence[Behaviour]) -> tuple[Novelty, ...]:
    kinds: tuple[tuple[Literal["tool", "host", "program", "model"], bool], ...] = (
        ("host", True),
        ("tool", True),
        ("model", False),
        ("program", False),
    )
    found = []
    for kind, alert in kinds:
        before = {item for run in baseline for item in _items(run, kind)}
        places: dict[str, list[str]] = {}
        for run in new:
            for item, evidence in _items(run, kind).items():
                if item not in before:
                    places.setdefault(item, []).append(f"{run.trial}: {evidence}")
        if kind == "model" and not before:
            continue
        for item, evidence_of in sorted(places.items()):
            found.append(Novelty(kind, item, alert, len(evidence_of), tuple(evidence_of[:_SHOWN])))
    return tuple(found)


def _items(run: Behaviour, kind: str) -> Mapping[str, str]:
    if kind == "host":
        return run.hosts
    if kind == "program":
        return run.programs
    if kind == "model":
        return dict.fromkeys(run.returned_models, "result.json#/returned_models")
    tools: dict[str, str] = {}
    for action in run.actions:
        tools.setdefault(action.tool, action.evidence)
    return tools


def _tools(pools: Sequence[Pool]) -> tuple[ToolChange, ...]:
    """Calls by tool, those that changed most first."""
    names = sorted({action.tool for pool in pools for run in pool.runs for action in run.actions})
    found = []
    for name in names:
        one, other = (
            sum(sum(run.tools.get(name, 0) for run in runs) / len(runs) for runs in side) / len(pools)
            for side in ([pool.baseline for pool in pools], [pool.new for pool in pools])
        )
        before, after = ([run for pool in pools for run in side(pool)] for side in (_baseline, _new))
        kinds = {action.kind for run in (*before, *after) for action in run.actions if action.tool == name}
        found.append(ToolChange(name, one, other, _repeat_share(after, name), _repeat_share(before, name),
                                kinds == {"read"}))  # fmt: skip
    return tuple(sorted(found, key=lambda tool: (-abs(tool.new - tool.baseline), tool.tool)))


def _baseline(pool: Pool) -> tuple[Behaviour, ...]:
    return pool.baseline


def _new(pool: Pool) -> tuple[Behaviour, ...]:
    return pool.new


def _repeat_share(runs: Sequence[Behaviour], tool: str) -> float:
    calls = sum(run.tools.get(tool, 0) for run in runs)
    repeats = sum(action.tool == tool for run in runs for action in run.repeats())
    return repeats / calls if calls else 0.0


def _task_change(pool: Pool) -> TaskChange:
    def ratio(name: Literal["tokens", "calls"]) -> float | None:
        sides = []
        for runs in (pool.baseline, pool.new):
            values = [len(run.actions) if name == "calls" else run.tokens for run in runs]
            known = [value for value in values if value is not None]
            sides.append(sum(known) / len(known) if known and len(known) == len(values) else None)
        return sides[1] / sides[0] if sides[0] and sides[1] is not None else None

    scores = [_mean([run.score for run in runs if run.score is not None]) for runs in (pool.baseline, pool.new)]
    return TaskChange(pool.task, pool.sizes, ratio("tokens"), ratio("calls"), scores[0], scores[1])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _divergences(pools: Sequence[Pool]) -> Iterator[Divergence]:
    for pool in pools:
        one, other = _typical(pool.baseline), _typical(pool.new)
        shared = common_prefix(one.sequence, other.sequence)
        if one.sequence == other.sequence:
            continue
        first, second = _at(one, shared), _at(other, shared)
        yield Divergence(
            pool.task,
            shared,
            first.text if first else None,
            second.text if second else None,
            f"{one.trial}: {first.evidence if first else 'end'}",
            f"{other.trial}: {second.evidence if second else 'end'}",
        )


def _typical(runs: Sequence[Behaviour]) -> Behaviour:
    """The run that is nearest to the others."""
    some = runs[:_TYPICAL_RUNS]
    totals = distances([run.sequence for run in some]).sum(axis=1)
    return some[int(totals.argmin())]


def _at(run: Behaviour, index: int) -> Action | None:
    return run.actions[index] if index < len(run.actions) else None


_MORE = {
    "tokens": "the tokens",
    "calls": "the calls",
    "cost": "the cost",
    "wall": "the time",
    "repetition": "calls that ask again what was answered",
    "errors": "calls that fail",
    "read_only": "calls that only read",
    "verification": "calls that check",
    "unverified_edits": "writes after the last check",
}


def _findings(
    shifts: Sequence[Shift], novelties: Sequence[Novelty], tools: Sequence[ToolChange], same: bool | None
) -> Iterator[str]:
    failed = {shift.name: shift for shift in shifts if shift.verdict == "fail"}
    more = next((failed[name] for name in ("tokens", "calls", "cost") if name in failed), None)
    if more is not None:
        result = "the same result" if same else "another result" if same is False else "a result that is not known"
        yield f"{result} with {more.point:.2g} times {_MORE[more.name]}{_culprit(tools)}"
    for shift in failed.values():
        if shift is not more:
            yield _sentence(shift)
    counts = Counter(novelty.kind for novelty in novelties)
    for novelty in novelties:
        if novelty.alert:
            yield f"never seen before: {novelty.kind} {novelty.item}, in {novelty.trials} trials"
        elif novelty.kind == "model":
            yield f"another model answered: {novelty.item} (the same name may have a new snapshot behind it)"
    if counts["program"]:
        items = [novelty.item for novelty in novelties if novelty.kind == "program"]
        rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        yield f"programs never run before: {', '.join(items[:_SHOWN])}{rest}"


def _culprit(tools: Sequence[ToolChange]) -> str:
    """The tool whose calls grew most, if one did."""
    grown = [tool for tool in tools if tool.new > tool.baseline]
    if not grown:
        return ""
    tool = grown[0]
    kind = "read-only tool " if tool.read_only else ""
    said = f": {kind}{tool.tool} is called {tool.new:.3g} times a run instead of {tool.baseline:.3g}"
    if tool.repeats > tool.baseline_repeats:
        said += f", {100 * tool.repeats:.0f} % of them asking again what was answered"
    return said


def _sentence(shift: Shift) -> str:
    if shift.name == "tool_mix":
        return f"another mix of tools: {shift.point:.3f} bits apart"
    if shift.name == "sequence":
        return (
            f"another course: runs of the two versions differ by {shift.new:.2f}, those of one by {shift.baseline:.2f}"
        )
    if shift.scale == "ratio":
        return f"{shift.point:.2g} times {_MORE[shift.name]}"
    if shift.name == "unverified_edits":
        return f"{_MORE[shift.name]}: {shift.baseline:.2f} a run before, {shift.new:.2f} now"
    return f"{_MORE[shift.name]}: {100 * (shift.baseline or 0):.0f} % before, {100 * (shift.new or 0):.0f} % now"
