"""`proctor replay --actions`: what the agent did, done again in a rebuilt sandbox, and every observation compared.

No model is needed and none is asked. Each repeat has a sandbox of its own from the recorded image. The calls go through
the same bounded room as the agent's did, so what is compared was made the same way.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import anyio

from proctor.agents.limits import LimitGuard
from proctor.agents.room import HIDDEN, BoundedRoom, RoomEvent
from proctor.common import RefusedError
from proctor.runs.equipment import Equipment
from proctor.runs.examiner import equipped_spec, wait_until_healthy
from proctor.runs.formats import DiffItem
from proctor.runs.isolation import Isolation
from proctor.runs.network import enter_phase, policy_for
from proctor.runs.plan import trial_limits
from proctor.runs.record import REDACTED, exec_line, read_lines
from proctor.runs.replay.compare import Cause, Difference, Judgement, Level, compare, judge
from proctor.runs.replay.disk import DiskDifference, compare_disks
from proctor.sandbox.contract import FileError
from proctor.tasks.model import AgentLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proctor.runs.formats import ExecLine
    from proctor.runs.replay.recorded import Recorded
    from proctor.sandbox import Edge
    from proctor.sandbox.contract import Sandbox

SEEDED: Mapping[str, str] = {"PYTHONHASHSEED": "0"}
"""What a probe sets to see whether chance was at work."""
_DAY_S = 86_400.0
_PROBES = 2


@dataclass(frozen=True, slots=True)
class Observed:
    """One call of a replay: the recorded line, the replayed one (None: it could not be made again), how alike."""

    recorded: ExecLine
    replayed: ExecLine | None
    level: Level | None
    difference: Difference | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Repeat:
    """One replay from start to end."""

    observed: tuple[Observed, ...]
    disk: tuple[DiskDifference, ...]
    disk_compared: bool
    content_compared: bool = True
    """False when the record does not hold what was in the files: then only the list of paths was compared."""

    @property
    def differences(self) -> int:
        """Observations and paths that differ by more than the clock."""
        calls = sum(one.level is Level.DIFFERENT for one in self.observed)
        return calls + sum(one.level is Level.DIFFERENT for one in self.disk)

    @property
    def clock(self) -> int:
        """Observations and paths that differ by the clock alone."""
        return sum(one.level is Level.CLOCK for one in self.observed) + sum(
            one.level is Level.CLOCK for one in self.disk
        )


@dataclass(frozen=True, slots=True)
class First:
    """The first difference of all repeats: in which call (or which path), and what it is likely due to."""

    where: str
    subject: str
    difference: Difference
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class ActionReplay:
    """What came of replaying the actions of a trial."""

    trial_id: str
    image: str
    repeats: tuple[Repeat, ...]
    first: First | None = None
    later: tuple[First, ...] = ()
    probes: int = 0
    skipped: tuple[str, ...] = field(default=())

    @property
    def differences(self) -> int:
        """Of all repeats together."""
        return sum(repeat.differences for repeat in self.repeats)

    @property
    def clock(self) -> int:
        """Of all repeats together."""
        return sum(repeat.clock for repeat in self.repeats)

    @property
    def score(self) -> float:
        """Determinism: the mean over repeats of the share of observations (the final disk is one) that came out as
        recorded, the clock aside."""
        shares = []
        for repeat in self.repeats:
            levels = [one.level is not Level.DIFFERENT for one in repeat.observed if one.level is not None]
            if repeat.disk_compared:
                levels.append(all(one.level is not Level.DIFFERENT for one in repeat.disk))
            shares.append(sum(levels) / len(levels) if levels else 1.0)
        return sum(shares) / len(shares) if shares else 1.0


async def replay_actions(
    recorded: Recorded,
    edge: Edge,
    *,
    repeat: int = 1,
    probe: bool = True,
    on_repeat: Callable[[str], None] = lambda line: None,
) -> ActionReplay:
    """Do the trial's actions again, `repeat` times, and compare. When something differs and `probe` is set, two more
    replays (one as they were, and two with a fixed hash seed) tell the cause."""
    lines = list(recorded.execs())
    check_replayable(recorded, lines)
    repeats = []
    for number in range(1, repeat + 1):
        repeats.append(await _repeat(recorded, lines, edge))
        on_repeat(f"replay {number} of {repeat}: {repeats[-1].differences} differences")
    different = any(one.differences for one in repeats)
    plain, seeded = list(repeats), list[Repeat]()
    if different and probe:
        on_repeat("replaying further to tell the cause")
        plain += [await _repeat(recorded, lines, edge) for _ in range(max(0, _PROBES - repeat))]
        seeded = [await _repeat(recorded, lines, edge, SEEDED) for _ in range(_PROBES)]
    found = _firsts(recorded, repeats, plain, seeded) if different else []
    return ActionReplay(
        trial_id=recorded.result.trial_id,
        image=recorded.image.digest,
        repeats=tuple(repeats),
        first=found[0] if found else None,
        later=tuple(found[1:]),
        probes=len(plain) + len(seeded) - len(repeats),
        skipped=tuple(dict.fromkeys(f"call {one.recorded.seq}: {one.note}" for one in repeats[0].observed if one.note)),
    )


def check_replayable(recorded: Recorded, lines: list[ExecLine]) -> None:
    """Refuse a trial whose actions the host did not see, or did not keep."""
    if not lines:
        raise RefusedError(
            "no action is on record: the agent did nothing in its sandbox that the host saw",
            field=recorded.result.trial_id,
            remedy="replay its model's answers: --model-calls",
        )
    for line in lines:
        hidden = [name for name, value in (line.env or {}).items() if value == REDACTED or HIDDEN in value]
        hidden += ["an argument"] if any(HIDDEN in part for part in line.argv or ()) else []
        if hidden:
            raise RefusedError(
                f"call {line.seq} was given {', '.join(hidden)}, whose value is a secret that no record keeps",
                field=recorded.result.trial_id,
                remedy="replay its model's answers: --model-calls",
            )
        if line.kind in ("write", "upload") and line.input is None:
            raise RefusedError(f"what call {line.seq} wrote is not in the record", field=recorded.result.trial_id,
                               remedy="records of earlier versions did not keep it")  # fmt: skip


async def _repeat(
    recorded: Recorded, lines: list[ExecLine], edge: Edge, env: Mapping[str, str] | None = None
) -> Repeat:
    """One replay in a sandbox of its own."""
    task = recorded.trial.task
    limits = trial_limits(recorded.trial, recorded.plan.limits)
    run_id, image, kit = recorded.plan.run_id, recorded.image, recorded.kit
    isolation = Isolation.locked(recorded.plan.options)
    spec = await equipped_spec(run_id, recorded.trial, image, limits, Equipment(edge), kit, isolation)
    network = policy_for(recorded.plan.network, task.network.agent)
    spec = replace(spec, network=network) if network is not None else spec
    async with await edge.create(spec, faults=recorded.trial.condition.network_faults) as box:
        await wait_until_healthy(box, task)
        await enter_phase(box, network, "agent")
        player = Player(recorded, box, env)
        observed = [await player.play(line) for line in lines]
        await box.kill_all()
        disk = await _disk(recorded, box)
        kept = (recorded.directory / "diff.tar.zst").exists()
        return Repeat(tuple(observed), tuple(disk or ()), disk is not None, kept)


class Player:
    """Makes recorded calls again in one sandbox."""

    def __init__(self, recorded: Recorded, box: Sandbox, env: Mapping[str, str] | None = None) -> None:
        self._recorded = recorded
        self._env = env
        task = recorded.trial.task
        workdir = task.environment.workdir or box.spec.workdir or box.image.workdir
        guard = LimitGuard(AgentLimits(total_s=_DAY_S, tool_call_s=_DAY_S, steps=1 << 30))
        self._seen: list[RoomEvent] = []
        self._box = box
        self._room = BoundedRoom(box, workdir, guard, user=task.agent_user, on_event=self._seen.append)

    async def play(self, line: ExecLine) -> Observed:
        """Make one call again and compare what is seen."""
        if line.error is not None and line.error.startswith("cut"):
            return Observed(line, None, None, note="it was cut by the end of the trial, so it is not compared")
        if line.injected is not None:
            return Observed(
                line, None, None, note=f"it was made to go wrong on purpose ({line.injected}), not by itself"
            )
        if line.by_host:
            await self._box.write(line.subject, self._recorded.given(line) or b"", mode=None)
            return Observed(line, None, None)
        self._seen.clear()
        with suppress(FileError, TimeoutError):  # it is in the event, as it was then
            await self._call(line)
        again = exec_line(self._seen[-1], line.seq)
        level, difference = compare(line, again)
        return Observed(line, again, level, difference)

    async def _call(self, line: ExecLine) -> None:
        data = self._recorded.given(line)
        match line.kind:
            case "bash" | "run":
                await self._room.again(
                    line.kind,
                    line.argv or ["sh", "-c", line.subject],
                    line.subject,
                    line.limit_s or _DAY_S,
                    env={**(line.env or {}), **(self._env or {})} or None,
                    stdin=data,
                )
            case "read":
                await self._room.read(line.subject)
            case "write":
                await self._room.write(line.subject, data or b"")
            case "list":
                await self._room.list(line.subject)
            case "upload":
                await self._room.upload_packed(data or b"", line.subject)
            case "remove":
                await self._room.remove(line.subject)
            case _:
                raise RefusedError(f"call {line.seq} is a {line.kind!r}, which this version cannot make again",
                                   field=self._recorded.result.trial_id)  # fmt: skip


async def _disk(recorded: Recorded, box: Sandbox) -> list[DiskDifference] | None:
    """The final disk against the recorded one; None when the record has none."""
    then = recorded.diff
    if then is None:
        return None
    fields = DiffItem.model_fields
    now = [DiffItem(**{name: getattr(one, name) for name in fields}) for one in await box.diff()]
    archive = recorded.directory / "diff.tar.zst"
    with TemporaryDirectory(prefix="proctor-replay-") as folder:
        mine = Path(folder, "diff.tar.zst")
        kept = archive.exists()
        if kept:
            await box.export_diff(mine)
        return await anyio.to_thread.run_sync(
            compare_disks, then.entries, now, archive if kept else None, mine if kept else None
        )


def _firsts(recorded: Recorded, repeats: list[Repeat], plain: list[Repeat], seeded: list[Repeat]) -> list[First]:
    """Every call that differs in some repeat, in order, each with its likely cause; then the paths."""
    found: list[First] = []
    for position, one in enumerate(repeats[0].observed):
        differing = [r.observed[position] for r in repeats if r.observed[position].level is Level.DIFFERENT]
        if not differing or differing[0].difference is None:
            continue
        again = [line for r in plain if (line := r.observed[position].replayed) is not None]
        fixed = [line for r in seeded if (line := r.observed[position].replayed) is not None]
        reached = names_reached(recorded.directory, one.recorded)
        judgement = judge(one.recorded, again, seeded=fixed, reached=reached, first=not found)
        found.append(First(f"call {one.recorded.seq}", one.recorded.subject, differing[0].difference, judgement))
    paths: dict[str, DiskDifference] = {}
    for repeat in repeats:
        for change in repeat.disk:
            if change.level is Level.DIFFERENT:
                paths.setdefault(change.path, change)
    found += [
        First("final disk", change.path, Difference(change.what, "", ""), _judge_path(change, plain, first=not found))
        for change in paths.values()
    ]
    return found


def names_reached(directory: Path, line: ExecLine) -> list[str]:
    """Which names the sandbox asked for while a recorded call ran, by the host's own record of its network."""
    begin = datetime.fromisoformat(line.started_at).timestamp()
    names: dict[str, None] = {}
    for event in read_lines(directory / "network.jsonl"):
        name, at = event.get("name"), event.get("at")
        if isinstance(name, str) and isinstance(at, (int, float)) and begin <= at <= begin + line.duration_s:
            names[name] = None
    return list(names)


def _judge_path(change: DiskDifference, plain: list[Repeat], *, first: bool) -> Judgement:
    hits = [any(one.path == change.path and one.level is Level.DIFFERENT for one in repeat.disk) for repeat in plain]
    if not all(hits):
        return Judgement(Cause.RACE, f"it differs in {sum(hits)} of {len(hits)} replays")
    if "/.git/objects/" in change.path or "/.git/logs/" in change.path:
        return Judgement(Cause.TIME, "git names commits by their time")
    if not first:
        return Judgement(Cause.UNKNOWN, "it may follow from an earlier difference")
    return Judgement(Cause.UNKNOWN, f"it differs in all {len(hits)} replays")
