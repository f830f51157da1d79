"""`proctor report`: runs as one page that people want to read, or as a file that programs read."""

from __future__ import annotations

import os
from pathlib import Path

import click

_FORMS = ["html", "md", "json", "csv", "parquet", "junit"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write. Default: report.html.")
@click.option("--format", "form", type=click.Choice(_FORMS), help="Default: by the name of the output, else html.")
@click.option("--trials", type=click.Choice(["auto", "none", "embed", "beside"]), default="auto", show_default=True,
              help="The story of each trial: in the page, in a folder beside it, or none. "
              "auto: in the page, up to 150 trials.")  # fmt: skip
@click.option("--baseline", metavar="AGENT", help="The agent that the others are compared with. Default: the first.")
@click.option("--title", help="Default: the dataset's name and version.")
@click.option("--level", type=float, default=0.95, show_default=True, help="Of all intervals.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of bootstraps and permutations.")
def report(
    runs: tuple[Path, ...], *, output: Path | None, form: str | None, trials: str, baseline: str | None,
    title: str | None, level: float, seed: int,
) -> None:  # fmt: skip
    """Write a report on RUNs: run directories, or Parquet files of trials.

    The HTML report is one file that needs no network and no script. Every number has its interval and denominators, and
    the report says how far it can be trusted and why.
    """
    from proctor.analysis.aggregate import Options
    from proctor.common import ConfigError
    from proctor.runs.reporting import SUFFIXES, Request, write_report

    default = {"junit": "xml"}.get(form or "", form or "html")
    output = output or Path(f"report.{default}")
    chosen = form or SUFFIXES.get(output.suffix.lower())
    if chosen is None:
        known = ", ".join(SUFFIXES)
        raise ConfigError(
            f"{output.name} tells no form", field="--output", remedy=f"end it in {known}, or give --format"
        )
    asked = Options(level=level, seed=seed)
    workers = len(os.sched_getaffinity(0))
    written = write_report(Request(runs, output, chosen, trials, title, baseline, asked, workers))  # type: ignore[arg-type]
    beside = f" and {written.told} trials in {written.folder}" if written.folder else ""
    click.echo(f"report: {written.path}{beside}")
    if written.report is not None and written.report.trust.standing == "broken":
        for line in written.report.trust.broken:
            click.echo(f"warning: {line}", err=True)
