"""`proctor show`: a run as a table, a trial as a story, a transcript of another tool as its steps."""

from __future__ import annotations

from pathlib import Path

import click

FORMATS = ("text", "json", "atif", "otel")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("trial", required=False)
@click.option("--failures", is_flag=True, help="Why trials failed: an account by primary cause, and a card for each.")
@click.option("--explain-with", "model", metavar="MODEL", help="With --failures: let a model add statements to cards; "
              "each must quote the record, else it is dropped.")  # fmt: skip
@click.option("--explain-most", "most", type=click.IntRange(1), default=20, show_default=True,
              help="How many cards the model is asked about.")  # fmt: skip
@click.option("--steps", metavar="A..B", help="Only these steps of a trial, counted from 1.")
@click.option("--events", metavar="A..B", help="These lines of a trial's event log, as JSON, and nothing else.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True,
              help="How to print a trial: atif is ATIF v1.8, otel OpenTelemetry GenAI spans (OTLP JSON).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def show(
    run: Path,
    trial: str | None,
    *,
    failures: bool,
    model: str | None,
    most: int,
    steps: str | None,
    events: str | None,
    form: str,
    as_json: bool,
) -> None:
    """Show RUN, a directory that `proctor run` made, as a table; or one TRIAL of it as a readable story.

    Every number is computed from the records, the chain of the ledger is checked, and what is left out of a rate is
    listed with its reason. TRIAL is an id from the ledger, or a part of one that fits one trial only.

    RUN may also be the transcript of another tool (ATIF, mini-swe-agent, SWE-agent, OpenHands, Inspect): it is read,
    and what could not be carried over is named. TRIAL then says which one, where a file holds several.
    """
    from proctor.cli import _show

    if model is not None and not failures:
        raise click.UsageError("--explain-with goes with --failures")
    form = "json" if as_json and form == "text" else form
    if run.is_file():
        if failures or events:
            raise click.UsageError("--failures and --events are about runs, and this is a transcript")
        _show.transcript(run, trial, form, steps)
    elif failures:
        from proctor.cli._failures import show_failures

        show_failures(run, trial, as_json=form == "json", model=model, most=most)
    elif trial is not None:
        _show.trial(run, trial, form, steps, events)
    elif steps or events or form in ("atif", "otel"):
        raise click.UsageError("say which TRIAL")
    else:
        _show.table(run, as_json=form == "json")
