"""What `proctor show` prints: a table, a story, a transcript, and their machine-readable forms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from proctor.common import ConfigError, ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.runs.summary import RunView
    from proctor.trajectories.atif import Trajectory
    from proctor.trajectories.draft import Imported


def table(run: Path, *, as_json: bool) -> None:
    """A run."""
    from proctor.runs import summary
    from proctor.runs.formats import dump_json

    view = _read(run)
    if as_json:
        click.echo(dump_json(summary.as_json(view), indent=1), nl=False)
    else:
        from proctor.runs.table import console, print_run

        print_run(console(), view)
    end(run, view.damage)


def _read(run: Path) -> RunView:
    """The run; what looks like damage is read again once nobody writes any more, for a run may just have ended."""
    from proctor.runs.ledger import being_written
    from proctor.runs.summary import read_run

    view = read_run(run)
    return view if view.damage is None or being_written(run) else read_run(run)


def end(run: Path, damage: str | None, *, intact: bool = True) -> None:
    """Exit code 1 for a run, or a trial of it, that was changed or is damaged; one that is still written is neither."""
    from proctor.runs.ledger import being_written

    if damage is not None:
        click.echo(f"{run}: damaged: {damage}", err=True)
    if not intact or (damage is not None and not being_written(run)):
        raise click.exceptions.Exit(ExitCode.FAILED)


def trial(run: Path, name: str, form: str, steps: str | None, events: str | None) -> None:
    """One trial of a run."""
    from proctor.runs import story
    from proctor.runs.formats import dump_json
    from proctor.runs.table import console

    view = _read(run)
    if events is not None:
        from proctor.runs.events import EventLog

        first, last = read_range(events, "--events")
        for event in EventLog(run / "trials" / story.find_trial(view, name)).read(first, last):
            line = {"seq": event.seq, "at": event.at, "kind": event.kind, "data": event.data}
            click.echo(dump_json(line), nl=False)
        return
    first, last = read_range(steps, "--steps")
    found = story.read_trial(view, name)
    if form == "json":
        click.echo(dump_json(story.as_json(found), indent=1), nl=False)
    elif form in ("atif", "otel"):
        _export(found.trajectory, form)
    else:
        story.print_trial(console(), found, first, last)
    end(run, view.damage, intact=found.intact is not False)


def transcript(path: Path, name: str | None, form: str, steps: str | None) -> None:
    """The transcript of another tool."""
    from proctor.runs.story import print_lines
    from proctor.runs.table import console
    from proctor.runs.transcript import imported_text
    from proctor.trajectories.importer import import_file

    first, last = read_range(steps, "--steps")
    found = import_file(path)
    if name is None and len(found) > 1 and form == "text":
        for one in found:
            click.echo(f"{one.name}: {len(one.trajectory.steps)} steps")
        click.echo(f'next: proctor show {path} "{found[0].name}"')
        return
    chosen = choose(found, name, path)
    if form in ("atif", "otel", "json"):
        for loss in chosen.losses:
            click.echo(f"not carried over: {loss}", err=True)
        _export(chosen.trajectory, "atif" if form == "json" else form)
    else:
        print_lines(console(), imported_text(chosen, first, last))


def choose(found: list[Imported], name: str | None, path: Path) -> Imported:
    """The transcript of that name, or of the one name that contains it."""
    fitting = [one for one in found if name is None or one.name == name]
    fitting = fitting or [one for one in found if name is not None and name in one.name]
    if len(fitting) == 1:
        return fitting[0]
    some = "; ".join(one.name for one in found[:5]) + ("; …" if len(found) > 5 else "")
    message = f"it holds {len(found)} transcripts" if name is None else f"{name!r} fits {len(fitting)} of {len(found)}"
    raise ConfigError(f"{message}: {some}", field=str(path), remedy="name one")


def _export(trajectory: Trajectory, form: str) -> None:
    from proctor.trajectories.atif import dump_trajectory

    if form == "atif":
        click.echo(dump_trajectory(trajectory), nl=False)
        return
    from proctor import __version__
    from proctor.runs.formats import dump_json
    from proctor.trajectories.otel import export_spans

    click.echo(dump_json(export_spans(trajectory, version=__version__)), nl=False)


def read_range(text: str | None, option: str) -> tuple[int, int | None]:
    """`A..B`, `A..`, `..B` or `A` as first and last (None: the end), both included."""
    if text is None:
        return 1, None
    found = re.fullmatch(r"(\d*)\.\.(\d*)|(\d+)", text.strip())
    if found is None or text.strip() == "..":
        raise ConfigError(f"{text!r} is not a range", field=option, remedy="like 10..20, 10.. or 10")
    if found[3]:
        return max(1, int(found[3])), int(found[3])
    first, last = int(found[1] or 1), int(found[2]) if found[2] else None
    if first < 1 or (last is not None and last < first):
        raise ConfigError(f"{text!r} is not a range", field=option, remedy="counted from 1, like 10..20")
    return first, last
