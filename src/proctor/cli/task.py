"""`proctor task`: check and import tasks and datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from proctor.tasks.check import CheckReport
    from proctor.tasks.model import Unrunnable

EXISTING = click.Path(exists=True, path_type=Path)


@click.group()
def task() -> None:
    """Check and import tasks and datasets."""


@task.command()
@click.argument("paths", nargs=-1, required=True, type=EXISTING)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--errors-only", is_flag=True, help="Leave warnings out.")
@click.pass_context
def check(context: click.Context, paths: tuple[Path, ...], as_json: bool, errors_only: bool) -> None:
    """Say everything that is wrong with a task, a folder of tasks, a dataset or SWE rows.

    Exit code 4 when there is an error; warnings alone are 0.
    """
    from proctor.common import ExitCode
    from proctor.tasks.check import check_any

    reports = [check_any(path) for path in paths]
    if as_json:
        click.echo(json.dumps([_report_json(report, errors_only) for report in reports], indent=1))
    else:
        for report in reports:
            _print_report(report, errors_only)
    if any(report.errors for report in reports):
        context.exit(int(ExitCode.BAD_INPUT))


def _report_json(report: CheckReport, errors_only: bool) -> dict[str, Any]:
    from dataclasses import asdict

    found = [asdict(one) for one in report.problems if one.severity == "error" or not errors_only]
    counts = {"tasks": report.tasks, "errors": report.errors, "warnings": report.warnings}
    return {"path": str(report.path), **counts, "problems": found}


def _print_report(report: CheckReport, errors_only: bool) -> None:
    shown = [one for one in report.problems if one.severity == "error" or not errors_only]
    places = [one.file if one.line is None else f"{one.file}:{one.line}" for one in shown]
    width = max((len(place) for place in places), default=0)
    for place, one in zip(places, shown, strict=True):
        text = f"{one.field}: {one.message}" if one.field else one.message
        text += f" ({one.remedy})" if one.remedy else ""
        rule = f" [{one.rule}]" if one.rule else ""
        severity = click.style(f"{one.severity:<7}", fg="red" if one.severity == "error" else "yellow")
        click.echo(_printable(f"{place:<{width}}  {severity}  {text}{rule}"))
    counts = ((report.tasks, "task"), (report.errors, "error"), (report.warnings, "warning"))
    text = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)
    click.echo(f"{report.path}: {text}")


def _printable(text: str) -> str:
    """Names of files need not be text."""
    return text.encode("utf-8", "backslashreplace").decode()


@task.command(name="import")
@click.argument("kind", type=click.Choice(["swe", "harbor"]))
@click.argument("source", type=EXISTING)
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Where tasks go.")
@click.option("--environments", type=EXISTING, help="swe: folders with env.json, each named by its instance id.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def import_(kind: str, source: Path, out: Path, environments: Path | None, as_json: bool) -> None:
    """Turn SWE rows or Harbor tasks in SOURCE into task directories and a dataset.toml."""
    from proctor.tasks.harbor import import_harbor
    from proctor.tasks.swe import import_swe

    if kind == "swe":
        swe = import_swe(source, out, environments=environments, progress=_progress)
        imported, kept, unrunnable = swe.imported, swe.kept, swe.unrunnable
    else:
        if environments is not None:
            raise click.UsageError("--environments goes with swe")
        harbor = import_harbor(source, out, progress=_progress)
        imported, kept, unrunnable = harbor.imported, harbor.kept, harbor.unrunnable
    if as_json:
        names = [{"name": one.name, "reason": one.reason} for one in unrunnable]
        click.echo(json.dumps({"out": str(out), "imported": imported, "kept": kept, "unrunnable": names}, indent=1))
    else:
        _print_import(out, imported, kept, unrunnable)


def _progress(name: str, done: int, total: int) -> None:
    """A line on a terminal's stderr that replaces itself; silent elsewhere."""
    import sys

    if sys.stderr.isatty():
        text = f"{done}/{total} {name}" if name else ""
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def _print_import(
    out: Path, imported: tuple[str, ...], kept: tuple[str, ...], unrunnable: tuple[Unrunnable, ...]
) -> None:
    for one in unrunnable:
        click.echo(f"not runnable  {one.name}: {one.reason}")
    click.echo(
        f"{out / 'dataset.toml'}: {len(imported)} imported, {len(kept)} already there, {len(unrunnable)} not runnable"
    )


@task.command()
@click.argument("paths", nargs=-1, required=True, type=EXISTING)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object from path to digest.")
def digest(paths: tuple[Path, ...], as_json: bool) -> None:
    """Print the digest of task directories (or of all in a folder), as a dataset.toml names them."""
    from proctor.common import ConfigError
    from proctor.tasks.load import TASK_FILE, task_digest

    found: dict[str, str] = {}
    for path in paths:
        folders = [path] if (path / TASK_FILE).is_file() or not path.is_dir() else sorted(path.iterdir())
        tasks = [folder for folder in folders if (folder / TASK_FILE).is_file()]
        if not tasks:
            raise ConfigError("holds no task directories", field=str(path), remedy="each has a task.toml")
        found |= {str(folder): task_digest(folder) for folder in tasks}
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        for path_text, value in found.items():
            click.echo(f"{value}  {path_text}")
