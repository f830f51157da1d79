"""From the record of a trial to its behaviour (`proctor.analysis.behaviour`): what it did, with pointers to evidence.

Actions are the tool calls of the trajectory; where it has none, the calls on the sandbox that the host logged.
Programs, hosts and written paths are taken from both, since what a harness does not report is in the host's log all the
same.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.analysis.behaviour import Action, Behaviour, exec_action, tool_action
from proctor.analysis.frame import GRADED
from proctor.common import ConfigError
from proctor.runs.formats import ExecLine, parse
from proctor.trajectories.atif import read_trajectory, result_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import polars as pl

    from proctor.runs.formats import StreamLine
    from proctor.trajectories.atif import ObservationResult, ToolCall, Trajectory


def read_behaviours(trials: pl.DataFrame) -> list[Behaviour]:
    """The behaviour of each graded trial of a frame. Raises ConfigError when a record is not there to be read: a
    Parquet file holds amounts and outcomes, not what was done."""
    import polars as pl

    graded = trials.filter(pl.col("outcome").is_in(GRADED))
    return [read_behaviour(row) for row in graded.iter_rows(named=True)]


def read_behaviour(row: Mapping[str, Any]) -> Behaviour:
    """The behaviour of one trial, given its row of the frame."""
    if row["record"] is None:
        raise ConfigError("behaviour is read from records, and this trial comes without one", field=row["trial_id"],
                          remedy="give run directories, not Parquet files")  # fmt: skip
    folder = Path(row["record"])
    reported = list(trajectory_actions(read_trajectory(folder / "trajectory.json")))
    return behaviour_of(row, reported, list(exec_actions(exec_lines(folder / "exec.jsonl"))))


def behaviour_of(row: Mapping[str, Any], reported: list[Action], logged: list[Action]) -> Behaviour:
    """The behaviour of one trial from its row, the tool calls of its trajectory, and the host's log."""
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]
    return Behaviour(
        trial=row["trial_id"],
        run=row["run_id"],
        task=row["task"],
        agent=row["agent"],
        actions=tuple(reported or logged),
        outcome=row["outcome"],
        score=row["score"],
        tokens=prompt + completion if prompt is not None and completion is not None else None,
        cost_usd=row["cost_usd"],
        wall_s=row["wall_s"],
        returned_models=tuple(row["returned_models"] or ()),
        task_digest=row["task_digest"],
        image_digest=row["image_digest"],
        limits=row["limits"],
        condition=row["condition"],
        cluster=row["cluster"],
        programs=_collected("programs", logged, reported),
        hosts=_collected("hosts", logged, reported),
        writes=_collected("writes", logged, reported),
        record=row["record"],
    )


def trajectory_actions(trajectory: Trajectory, injected: frozenset[str] = frozenset()) -> Iterator[Action]:
    """The tool calls of an ATIF document of any version, in order; copied context is not done again. `injected` are the
    commands and paths of calls that were made to go wrong on purpose."""
    for index, step in enumerate(trajectory.steps):
        if step.is_copied_context:
            continue
        results = step.observation.results if step.observation else []
        for number, call in enumerate(step.tool_calls or ()):
            action = _action(call, result_of(call, results, alone=len(step.tool_calls or ()) == 1),
                             f"trajectory.json#/steps/{index}/tool_calls/{number}")  # fmt: skip
            yield replace(action, injected=True) if action.failed and _is_of(call, injected) else action


def _is_of(call: ToolCall, injected: frozenset[str]) -> bool:
    """Whether the call is one of those; the log has absolute paths where a call may have relative ones."""
    for key in ("command", "path"):
        said = call.arguments.get(key)
        if isinstance(said, str) and (
            said in injected or any(one.endswith(f"/{said.removeprefix('./')}") for one in injected)
        ):
            return True
    return False


def excused(actions: Iterable[Action], names: frozenset[str]) -> list[Action]:
    """The actions, with those that failed and speak of a host whose network was broken on purpose marked so."""
    return [replace(one, injected=True) if one.failed and names.intersection(one.hosts) else one for one in actions]


def exec_lines(path: Path) -> list[ExecLine]:
    """The lines of `exec.jsonl`; none when there is no such file."""
    if not path.exists():
        return []
    return [
        parse(ExecLine, raw, name=f"{path}:{number}") for number, raw in enumerate(path.read_bytes().splitlines(), 1)
    ]


def injected_calls(lines: Iterable[ExecLine]) -> dict[str, tuple[str, str]]:
    """Calls on the sandbox that were made to go wrong on purpose: subject and how, by their evidence."""
    return {f"exec.jsonl#{line.seq}": (line.subject, line.injected) for line in lines if line.injected is not None}


def _action(call: ToolCall, result: ObservationResult | None, evidence: str) -> Action:
    content = None if result is None or result.content is None else text_of(result.content)
    failed = result is not None and bool((result.extra or {}).get("error"))
    failed = failed or (content is not None and content.startswith("exit code: ") and content[11:12] not in ("0", ""))
    return tool_action(call.function_name, call.arguments, result=content, failed=failed, evidence=evidence)


def exec_actions(lines: Iterable[ExecLine]) -> Iterator[Action]:
    """The calls on the sandbox, as the host logged them."""
    for line in lines:
        yield exec_action(
            line.kind,
            line.subject,
            result=_answer(line),
            failed=line.error is not None
            or line.timed_out
            or line.exit_code not in (0, None)
            or line.signal is not None,
            evidence=f"exec.jsonl#{line.seq}",
            content=line.digest,
            injected=line.injected is not None,
        )


def _answer(line: ExecLine) -> str | None:
    if line.stdout is None and line.stderr is None:
        return line.digest or line.error
    parts = [str(line.exit_code), *(_stream(stream) for stream in (line.stdout, line.stderr))]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _stream(stream: StreamLine | None) -> str:
    return "" if stream is None else f"{stream.total}:{stream.text if stream.text is not None else stream.base64}"


def _collected(name: str, *sources: list[Action]) -> dict[str, str]:
    """Item -> where it is on record first; what the host logged goes first."""
    found: dict[str, str] = {}
    for actions in sources:
        for action in actions:
            for item in getattr(action, name):
                found.setdefault(item, action.evidence)
    return found
