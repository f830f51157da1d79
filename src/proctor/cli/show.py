"""`proctor show`: a run as a table, a trial as a story."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("trial", required=False)
@click.option("--failures", is_flag=True, help="Why trials failed: an account by primary cause, and a card for each.")
@click.option("--explain-with", "model", metavar="MODEL", help="With --failures: let a model add statements to cards; "
              "each must quote the record, else it is dropped.")  # fmt: skip
@click.option("--explain-most", "most", type=click.IntRange(1), default=20, show_default=True,
              help="How many cards the model is asked about.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def show(run: Path, trial: str | None, *, failures: bool, model: str | None, most: int, as_json: bool) -> None:
    """Show RUN, a directory that `proctor run` made, as a table; or one TRIAL of it as a readable story.

    Every number is computed from the records, the chain of the ledger is checked, and what is left out of a rate is
    listed with its reason. TRIAL is an id from the ledger, or a part of one that fits one trial only.
    """
    if model is not None and not failures:
        raise click.UsageError("--explain-with goes with --failures")
    if failures:
        from proctor.cli._failures import show_failures

        show_failures(run, trial, as_json=as_json, model=model, most=most)
        return
    from proctor.runs import story, summary
    from proctor.runs.formats import dump_json

    view = summary.read_run(run)
    if trial is None:
        if as_json:
            click.echo(dump_json(summary.as_json(view), indent=1), nl=False)
        else:
            from proctor.runs.table import console, print_run

            print_run(console(), view)
        return
    found = story.read_trial(view, trial)
    if as_json:
        click.echo(dump_json(story.as_json(found), indent=1), nl=False)
    else:
        from proctor.runs.table import console

        story.print_trial(console(), found)
