"""`proctor replay --model-calls`: the recorded answers stand in for the model, in order, for whatever harness it was.

The harness runs again, in a rebuilt sandbox, through the same engine; the result is graded like any trial. Every
request that is not what it was then is reported, and so is everything else that came out differently.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from proctor.common import RefusedError
from proctor.models.serving import served
from proctor.runs.formats import COUNT, DiffFile, load
from proctor.runs.replay.again import carry_out, plan_of, replaying_gateway
from proctor.runs.replay.answers import AnswerServer
from proctor.runs.replay.compare import Difference, Level, compare
from proctor.runs.replay.disk import DiskDifference, compare_disks
from proctor.runs.replay.recorded import read_calls, read_execs
from proctor.runs.replay.requests import diverges

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from proctor.agents.contract import Room
    from proctor.agents.room import BoundedRoom
    from proctor.runs.formats import ExecLine, ModelCallLine, TrialResult
    from proctor.runs.plan import TrialPlan
    from proctor.runs.record import TrialRecord
    from proctor.runs.replay.recorded import Recorded
    from proctor.runs.replay.requests import Divergence
    from proctor.sandbox.contract import Sandbox


@dataclass(frozen=True, slots=True)
class CallReplay:
    """What came of a replay of model calls. `observed`: for each call on the sandbox, both lines, how alike."""

    before: TrialResult
    after: TrialResult
    asked: int
    extra: int
    unasked: int
    divergences: tuple[Divergence, ...]
    observed: tuple[tuple[ExecLine | None, ExecLine | None, Level, Difference | None], ...]
    disk: tuple[DiskDifference, ...]

    @property
    def differences(self) -> int:
        """Everything that differs by more than the clock."""
        return (
            sum(one.level is Level.DIFFERENT for one in self.divergences)
            + self.extra
            + self.unasked
            + sum(level is Level.DIFFERENT for _, _, level, _ in self.observed)
            + sum(one.level is Level.DIFFERENT for one in self.disk)
            + ((self.before.outcome, self.before.rewards) != (self.after.outcome, self.after.rewards))
        )

    @property
    def clock(self) -> int:
        """Everything that differs by the clock alone."""
        levels = [*(one.level for one in self.divergences), *(level for _, _, level, _ in self.observed)]
        return [*levels, *(one.level for one in self.disk)].count(Level.CLOCK)


class Beginning:
    """Sets the answers back to the first one whenever a trial begins; the room is the trial's own."""

    def __init__(self, server: AnswerServer) -> None:
        self._server = server

    async def begin(self, trial: TrialPlan, box: Sandbox, record: TrialRecord) -> None:
        """See `Playback.begin`."""
        self._server.begin()

    def room(self, room: BoundedRoom) -> Room:
        """See `Playback.room`."""
        return room


async def replay_calls(recorded: Recorded, directory: Path | None = None) -> CallReplay:
    """Run the trial again on its recorded answers. The new record is kept in `directory`, if one is given."""
    calls, counts = calls_of(recorded)
    model = recorded.trial.agent.model
    if not calls or model is None:
        raise RefusedError("no call of a model is on record", field=recorded.result.trial_id,
                           remedy="replay what it did: --actions")  # fmt: skip
    server = AnswerServer(calls, counts=counts)
    async with served(server.app) as url, _kept(directory) as place:
        agent = replace(recorded.trial.agent, model=replace(model, base_url=f"{url}/v1", api_key_env=None))
        trial = replace(recorded.trial, agent=agent)
        plan = plan_of(
            recorded,
            [trial],
            {"kind": "model-calls", "endpoint": model.base_url},
            replaying_gateway(recorded, f"{url}/v1"),
        )
        execution = await carry_out(recorded, plan, place, Beginning(server))
        record = place / "trials" / trial.id
        observed = tuple(_pairs(list(recorded.execs()), list(read_execs(record))))
        return CallReplay(
            before=recorded.result,
            after=execution.results[trial.id],
            asked=server.asked,
            extra=server.extra,
            unasked=server.unasked,
            divergences=tuple(divergences(calls, record)),
            observed=observed,
            disk=tuple(_disk(recorded.directory, record)),
        )


def divergences(calls: Sequence[ModelCallLine], record: Path) -> Iterator[Divergence]:
    """Every request of the new record that is not what was asked then. Both are as the agent sent them: what the
    gateway enforces on the way is the same, and is not compared."""
    asked = (line for line in read_calls(record) if line.protocol != COUNT)
    for number, (then, now) in enumerate(zip(calls, asked, strict=False), 1):
        if (found := diverges(number, then.request, now.request)) is not None:
            yield found


def calls_of(recorded: Recorded) -> tuple[list[ModelCallLine], list[ModelCallLine]]:
    """The calls of the model, and the counts of tokens beside them."""
    lines = list(recorded.calls())
    return [line for line in lines if line.protocol != COUNT], [line for line in lines if line.protocol == COUNT]


@asynccontextmanager
async def _kept(directory: Path | None) -> AsyncIterator[Path]:
    if directory is not None:
        yield directory
        return
    with TemporaryDirectory(prefix="proctor-replay-") as folder:
        yield Path(folder)


def _pairs(
    then: list[ExecLine], now: list[ExecLine]
) -> list[tuple[ExecLine | None, ExecLine | None, Level, Difference | None]]:
    found: list[tuple[ExecLine | None, ExecLine | None, Level, Difference | None]] = []
    for number in range(max(len(then), len(now))):
        before = then[number] if number < len(then) else None
        after = now[number] if number < len(now) else None
        if before is None or after is None or (before.kind, before.subject) != (after.kind, after.subject):
            parts = [f"{one.kind}: {one.subject}" if one else "(nothing)" for one in (before, after)]
            found.append((before, after, Level.DIFFERENT, Difference("call", *parts)))
        else:
            found.append((before, after, *compare(before, after)))
    return found


def _disk(then: Path, now: Path) -> list[DiskDifference]:
    lists = [directory / "diff.json" for directory in (then, now)]
    if not all(path.exists() for path in lists):
        return []
    before, after = (load(DiffFile, path).entries for path in lists)
    archives = [path if path.exists() else None for path in (then / "diff.tar.zst", now / "diff.tar.zst")]
    return compare_disks(before, after, *archives)
