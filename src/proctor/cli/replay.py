"""`proctor replay`: a trial done again."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("trial")
@click.option("--actions", is_flag=True, help="Execute the recorded actions in a rebuilt sandbox; no model is needed.")
@click.option("--model-calls", is_flag=True, help="Run its harness again; the recorded answers stand in for the model.")
@click.option("--repeat", type=click.IntRange(1, 1000), metavar="N", help="Do that N times, for a determinism score.")
@click.option("--strict", is_flag=True, help="Differences that only the clock made count as well.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Keep the record of the new trial."
)
@click.option("--no-probe", is_flag=True, help="Do not replay further to tell the cause of a difference.")
@click.option("--tasks", type=click.Path(path_type=Path), metavar="PATH", help="Where the tasks are now.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def replay(
    context: click.Context,
    run: Path,
    trial: str,
    *,
    actions: bool,
    model_calls: bool,
    repeat: int | None,
    strict: bool,
    output: Path | None,
    no_probe: bool,
    tasks: Path | None,
    as_json: bool,
) -> None:
    """Do TRIAL of RUN again, from its record, and say what comes out differently.

    \b
    proctor replay runs/run-… fix-median --actions --repeat 3
    proctor replay runs/run-… fix-median --model-calls

    The task and its image must be what they were, by digest; else this is refused. Exit codes: 0 no difference;
    1 differences; 4 bad input; 5 refused; 6 infrastructure.
    """
    from proctor.cli import _replay

    if actions == model_calls:
        raise click.UsageError("say what to replay: --actions or --model-calls")
    if model_calls:
        if repeat is not None or no_probe:
            raise click.UsageError("--repeat and --no-probe go with --actions")
        context.exit(_replay.model_calls(run, trial, tasks=tasks, output=output, strict=strict, as_json=as_json))
    if output is not None:
        raise click.UsageError("--actions makes no record, so there is nothing for --output")
    context.exit(
        _replay.actions(run, trial, tasks=tasks, repeat=repeat or 1, probe=not no_probe, strict=strict, as_json=as_json)
    )
