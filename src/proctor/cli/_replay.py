"""The kinds of `proctor replay`, each from arguments to an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import click

from proctor.common import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from proctor.runs.engine import Event
    from proctor.runs.replay.actions import ActionReplay
    from proctor.runs.replay.branch import Change


def actions(
    run: Path, trial: str, *, tasks: Path | None, repeat: int, probe: bool, strict: bool, as_json: bool
) -> ExitCode:
    """Replay the actions and print what came of it."""
    from proctor.runs.formats import dump_json, plain
    from proctor.runs.replay import tell
    from proctor.runs.replay.actions import replay_actions
    from proctor.runs.replay.recorded import find_recorded
    from proctor.sandbox import Edge

    async def work() -> ActionReplay:
        recorded = await find_recorded(run, trial, tasks=tasks)
        async with Edge() as edge:
            return await replay_actions(recorded, edge, repeat=repeat, probe=probe, on_repeat=_note)

    done = anyio.run(work)
    if as_json:
        click.echo(dump_json(plain(tell.actions_json(done)), indent=1), nl=False)
    else:
        _print(tell.actions_text(done, strict=strict))
    return ExitCode.FAILED if done.differences or (strict and done.clock) else ExitCode.OK


def model_calls(
    run: Path, trial: str, *, tasks: Path | None, output: Path | None, strict: bool, as_json: bool
) -> ExitCode:
    """Run the trial again on its recorded answers and print what came of it."""
    from proctor.runs.formats import dump_json, plain
    from proctor.runs.replay import tell
    from proctor.runs.replay.calls import CallReplay, replay_calls
    from proctor.runs.replay.recorded import find_recorded

    async def work() -> CallReplay:
        return await replay_calls(await find_recorded(run, trial, tasks=tasks), output)

    done = anyio.run(work)
    if as_json:
        click.echo(dump_json(plain(tell.calls_json(done)), indent=1), nl=False)
    else:
        _print(tell.calls_text(done, strict=strict))
    return ExitCode.FAILED if done.differences or (strict and done.clock) else ExitCode.OK


def change_of(reply: Path | None, files: tuple[str, ...], result: Path | None) -> Change:
    """The one change that is asked for; none: the model is asked again."""
    from proctor.runs.replay.branch import Change, read_files, read_reply, read_result

    if reply is not None:
        return read_reply(reply)
    if files:
        return read_files(files)
    return read_result(result) if result is not None else Change()


def branches(
    run: Path,
    trial: str,
    step: int,
    change: Change,
    *,
    tasks: Path | None,
    output: Path | None,
    count: int,
    model: str | None,
    as_json: bool,
) -> ExitCode:
    """Make branches and print what came of them."""
    from pathlib import Path as AnyPath

    from proctor.common import new_id
    from proctor.models.spec import load_model
    from proctor.runs.formats import dump_json, plain
    from proctor.runs.outcome import Outcome
    from proctor.runs.replay import tell
    from proctor.runs.replay.branch import Branches, branch
    from proctor.runs.replay.recorded import find_recorded

    directory = output or AnyPath("runs") / new_id("branch")
    spec = load_model(model) if model is not None else None

    async def work() -> Branches:
        recorded = await find_recorded(run, trial, tasks=tasks)

        def tell_trial(event: Event) -> None:
            if event.kind == "done" and event.result is not None:
                _note(f"{event.trial_id}: {event.result.outcome}")

        return await branch(recorded, step, change, directory, count=count, model=spec, on_event=tell_trial)

    done = anyio.run(work)
    if as_json:
        click.echo(dump_json(plain(tell.branches_json(done)), indent=1), nl=False)
    else:
        _print(tell.branches_text(done))
    results = [result for arm in done.arms.values() for result in arm]
    broken = {Outcome.INFRA_ERROR, Outcome.VERIFIER_ERROR}
    return ExitCode.INFRA if any(result.outcome in broken for result in results) else ExitCode.OK


def _note(line: str) -> None:
    """What goes on, for those who wait."""
    click.echo(line, err=True)


def _print(lines: Iterable[tuple[str, str]]) -> None:
    from rich.text import Text

    from proctor.runs.table import console

    out = console()
    for style, line in lines:
        out.print(Text(line, style=style), soft_wrap=True)
