"""`proctor replay --from STEP`: the state at a step, one thing changed there, and on with the live model.

What came before the step is played back: the recorded answers by `AnswerServer`, the recorded calls by `PlaybackRoom`.
At the step one reply, one file or one tool result is changed (or nothing: the model is asked again), and from there on
the harness talks to the live endpoint. With several branches the same is done as often without the change, in pairs:
the mean difference of their scores estimates what that one action was worth.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from anyio import to_thread

from proctor.agents.room import Given, RoomEvent
from proctor.common import ConfigError, InfraError, RefusedError, digest_bytes
from proctor.models.serving import served
from proctor.runs.clock import now_iso
from proctor.runs.replay.again import branching_gateway, carry_out, plan_of
from proctor.runs.replay.answers import AnswerServer, Live
from proctor.runs.replay.calls import calls_of, divergences
from proctor.runs.replay.compare import Level
from proctor.runs.replay.playback import PlaybackRoom
from proctor.runs.replay.point import Point, find_point
from proctor.runs.replay.snapshots import restore, snapshot_at, why_not_restorable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from proctor.agents.contract import Room
    from proctor.agents.room import BoundedRoom
    from proctor.analysis.paired import Estimate
    from proctor.analysis.proportions import Interval
    from proctor.models.contract import ModelSpec
    from proctor.runs.engine import OnEvent
    from proctor.runs.formats import ModelCallLine, TrialResult
    from proctor.runs.plan import TrialPlan
    from proctor.runs.record import TrialRecord
    from proctor.runs.replay.recorded import Recorded
    from proctor.runs.replay.snapshots import Snapshot
    from proctor.sandbox.contract import Sandbox

Kind = Literal["reply", "write", "result", "none"]
CHANGED, ORIGINAL = "changed", "original"
_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0}
"""A reply that a person wrote was asked of nobody."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is changed at the step: the model's reply, files that are written before it, the result of its first call
    on the sandbox, or nothing (the model is asked again)."""

    kind: Kind = "none"
    reply: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] | None = None
    result: bytes | None = None

    @property
    def text(self) -> str:
        """In a few words, for the record."""
        if self.kind == "reply":
            said = str((self.reply or {}).get("text") or "")
            names = [str(call.get("name")) for call in (self.reply or {}).get("tool_calls", ())]
            return f"another reply ({', '.join(names) or said[:60]})"
        if self.kind == "write":
            return f"wrote {', '.join(self.files or ())}"
        return "another tool result" if self.kind == "result" else "asked the model again"


@dataclass(frozen=True, slots=True)
class Worth:
    """What the change did: pairs of branches in which both were graded, and the mean difference of their scores."""

    pairs: tuple[tuple[float, float], ...]
    """Score with the change, and without it."""
    estimate: Estimate

    def interval(self) -> Interval:
        """The 95 % interval, within what a difference of such scores can be."""
        from proctor.analysis.proportions import Interval

        found = self.estimate.interval()
        if not all(0 <= score <= 1 for pair in self.pairs for score in pair):
            return found
        return Interval(found.point, max(-1.0, found.low), min(1.0, found.high), found.level, found.formula)


@dataclass(frozen=True, slots=True)
class Branches:
    """The trials that were made: by arm (`changed`, `original`), in the order of their attempts."""

    directory: Path
    step: int
    change: str
    restored: str
    arms: Mapping[str, tuple[TrialResult, ...]]
    worth: Worth | None
    notes: tuple[str, ...] = ()


def read_reply(path: Path) -> Change:
    """`--set-reply FILE`: JSON with `text`, `tool_calls` (`name`, `arguments`) and `reasoning`; anything else is the
    text of the reply. Raises ConfigError."""
    content = _bytes(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("not text", field=f"--set-reply {path}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return Change("reply", reply={"text": text, "usage": _NO_USAGE})
    if unknown := value.keys() - {"text", "tool_calls", "reasoning"}:
        raise ConfigError(f"unknown key {min(unknown)!r}", field=f"--set-reply {path}",
                          remedy="text, tool_calls, reasoning")  # fmt: skip
    calls = value.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(one, dict) and "name" in one for one in calls):
        raise ConfigError("tool_calls is no list of objects with name and arguments", field=f"--set-reply {path}")
    made = [
        {"id": f"branch-{number}", "name": str(one["name"]), "arguments": _arguments(one.get("arguments", {}))}
        for number, one in enumerate(calls, 1)
    ]
    return Change("reply", reply={**value, "tool_calls": made, "usage": _NO_USAGE})


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_files(pairs: tuple[str, ...]) -> Change:
    """`--write PATH=FILE`, for each. Raises ConfigError."""
    from pathlib import Path

    files: dict[str, bytes] = {}
    for pair in pairs:
        target, equals, source = pair.partition("=")
        if not equals or not target or not source:
            raise ConfigError(f"{pair!r} is not PATH=FILE", field="--write")
        if not target.startswith("/"):
            raise ConfigError(f"{target!r} is not an absolute path in the sandbox", field="--write")
        files[target] = _bytes(Path(source))
    return Change("write", files=files)


def read_result(path: Path) -> Change:
    """`--set-result FILE`: what the first call of the step is answered."""
    return Change("result", result=_bytes(path))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from error


async def branch(
    recorded: Recorded,
    step: int,
    change: Change,
    directory: Path,
    *,
    count: int = 1,
    model: ModelSpec | None = None,
    on_event: OnEvent = lambda event: None,
) -> Branches:
    """Make `count` branches with the change and, when there are several, as many without it. `model` is the live one
    (default: that of the trial). Raises what `find_recorded` and `find_point` raise."""
    live = model or live_model(recorded)
    point = find_point(recorded, step)
    if change.kind == "result" and not _acts(recorded, point):
        raise RefusedError(f"step {step} made no call on the sandbox whose result could be changed", field="--from")
    snapshot, unusable = await to_thread.run_sync(_snapshot, recorded.directory, point.step)
    calls, counts = calls_of(recorded)
    server = AnswerServer(calls, counts=counts)
    arms = (CHANGED, ORIGINAL) if count > 1 else (CHANGED,)
    playback = _Branching(recorded, point, change, server, live, snapshot)
    async with served(server.app) as url:
        found = branching_gateway(recorded, f"{url}/v1") if model is None else None
        if found is not None:
            playback.endpoint = found[1]
        trials = [_trial(recorded, arm, number, live, f"{url}/v1") for number in range(1, count + 1) for arm in arms]
        restored = "snapshot" if snapshot is not None else "replay"
        parent = {"kind": "branch", "step": step, "change": change.text, "restored": restored}
        parent["endpoint"] = playback.endpoint
        plan = plan_of(recorded, trials, parent, found[0] if found is not None else None)
        execution = await carry_out(recorded, plan, directory, playback, on_event)
    done = {arm: tuple(execution.results[one.id] for one in trials if one.agent.label.endswith(f".{arm}"))
            for arm in arms}  # fmt: skip
    worth = worth_of(done[CHANGED], done[ORIGINAL]) if count > 1 else None
    notes = (*unusable, *_notes(recorded, live, count))
    notes += tuple(_strayed(point, calls, directory, [one for arm in done.values() for one in arm]))
    return Branches(directory, step, change.text, restored, done, worth, notes)


def _snapshot(directory: Path, step: int) -> tuple[Snapshot | None, tuple[str, ...]]:
    """The snapshot before a step, if it can be used, and a note when there is one that cannot."""
    found = snapshot_at(directory, step)
    reason = why_not_restorable(found.archive) if found is not None else None
    return (None, (f"the snapshot is not used: {reason}",)) if reason else (found, ())


def _strayed(point: Point, calls: list[ModelCallLine], directory: Path, results: list[TrialResult]) -> Iterator[str]:
    """A note for each branch whose agent asked something else before the step: it was not where it had been."""
    for result in results:
        record = directory / "trials" / result.trial_id
        early = [one for one in divergences(calls[: point.calls], record) if one.level is Level.DIFFERENT]
        if early:
            yield f"{result.agent} {result.attempt}: {len(early)} requests before the step were not as recorded"


def live_model(recorded: Recorded) -> ModelSpec:
    """The model of the trial, with the name of its key. Raises RefusedError for an agent without one."""
    from proctor.runs.lock import unlock_model

    agent = next(one for one in recorded.lock.agents if one.label == recorded.trial.agent.label)
    if agent.model is None:
        raise RefusedError("its agent has no model to go on with", field=recorded.result.trial_id)
    model = unlock_model(agent.model)
    parent = recorded.lock.parent
    # The model of a trial that was made from another is in its lock where recorded answers were played.
    return replace(model, base_url=parent.endpoint) if parent is not None and parent.endpoint else model


def _acts(recorded: Recorded, point: Point) -> bool:
    calls = recorded.view.trajectory.steps[point.step - 1].tool_calls or ()
    return any(call.function_name != "finish" for call in calls)


def _notes(recorded: Recorded, live: ModelSpec, count: int) -> tuple[str, ...]:
    notes = list(recorded.notes)
    if count > 1 and not live.temperature:
        notes.append("the temperature is 0: branches of one arm differ only where the endpoint itself does")
    return tuple(notes)


def _trial(recorded: Recorded, arm: str, number: int, live: ModelSpec, url: str) -> TrialPlan:
    """Branch `number` of an arm. The trial's own seed is kept: what came before the step depends on it."""
    agent = recorded.trial.agent
    changed = replace(agent, label=f"{agent.label}.{arm}", model=replace(live, base_url=url))
    return replace(recorded.trial, id=f"{recorded.result.trial_id}.{arm}.{number}", agent=changed, attempt=number)


def host_write(path: str, content: bytes) -> RoomEvent:
    """A file that the host changed, as the execution log has it: so the branch can be done again itself."""
    given = Given(data=content)
    event = RoomEvent("write", path, now_iso(), 0.0, 0.0, None, len(content), digest_bytes(content), given=given)
    return replace(event, by_host=True)


class _Branching:
    """The Playback of branches: sets answers and room to what the arm of the trial needs."""

    def __init__(
        self,
        recorded: Recorded,
        point: Point,
        change: Change,
        server: AnswerServer,
        live: ModelSpec,
        snapshot: Snapshot | None,
    ) -> None:
        self._recorded = recorded
        self._point = point
        self._change = change
        self._server = server
        self._live = live
        self.endpoint = live.base_url
        self._snapshot = snapshot
        self._lines = [line for line in recorded.execs()][: point.execs]
        self._then_see: bytes | None = None
        self._record: TrialRecord | None = None

    async def begin(self, trial: TrialPlan, box: Sandbox, record: TrialRecord) -> None:
        """Put the sandbox where it was, if there is a snapshot, and the answers at the first."""
        self._record = record
        change = self._change if trial.agent.label.endswith(f".{CHANGED}") else None
        if self._snapshot is not None:
            await restore(box, self._snapshot.archive)
        self._then_see = change.result if change is not None else None

        async def on_branch() -> None:
            for path, content in ((change.files or {}) if change is not None else {}).items():
                await box.write(path, content, mode=None)
                record.room_event(host_write(path, content))

        # With a change of the reply, or none at all, the step itself is the first that is live; else its recorded reply
        # is kept. Without the change, what a file was worth is told by asking the model again as well.
        asks_again = self._change.kind == "write" or (change is not None and change.kind in ("none", "reply"))
        self._server.begin(
            Live(
                base_url=self.endpoint,
                after=self._point.calls + (not asks_again),
                reply=change.reply if change is not None else None,
                on_branch=on_branch,
                seed=None if self._live.seed is None else self._live.seed + trial.attempt - 1,
                timeout_s=self._live.timeout_s,
            )
        )

    def room(self, room: BoundedRoom) -> Room:
        """The recorded calls first, then the real room."""
        return PlaybackRoom(
            room,
            self._lines,
            self._recorded.directory,
            execute=self._snapshot is None,
            then_see=self._then_see,
            secrets=self._record.secrets if self._record is not None else (),
        )


def score_of(result: TrialResult) -> float | None:
    """The score of a trial: its reward where it has one, else 1 or 0 for resolved or not; None when it was excluded."""
    if not result.outcome.is_graded:
        return None
    return result.rewards.get("reward", float(result.outcome == "resolved"))


def worth_of(changed: tuple[TrialResult, ...], original: tuple[TrialResult, ...]) -> Worth:
    """The paired estimate: mean difference over pairs of which both were graded, with a t interval (two pseudo-pairs
    where there is no spread: see `proctor.analysis.paired`). Raises InfraError when no pair was graded."""
    from proctor.analysis.paired import over_tasks, with_pseudo_pairs

    scores = [(score_of(one), score_of(other)) for one, other in zip(changed, original, strict=True)]
    pairs = tuple((one, other) for one, other in scores if one is not None and other is not None)
    if not pairs:
        raise InfraError("no pair of branches was graded", field="--branches", remedy="proctor show says why")
    estimate = over_tasks([one - other for one, other in pairs])
    return Worth(pairs, estimate if estimate.error else with_pseudo_pairs(estimate))
