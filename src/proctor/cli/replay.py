"""`proctor replay`: a trial done again."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("trial")
@click.option("--actions", is_flag=True, help="Execute the recorded actions in a rebuilt sandbox; no model is needed.")
@click.option("--model-calls", is_flag=True, help="Run its harness again; the recorded answers stand in for the model.")
@click.option("--from", "step", type=click.IntRange(1), metavar="STEP", help="Branch off this step and go on live.")
@click.option("--set-reply", type=click.Path(path_type=Path), metavar="FILE", help="Change the model's reply there.")
@click.option("--write", "files", multiple=True, metavar="PATH=FILE", help="Write a file of the sandbox before it.")
@click.option("--set-result", type=click.Path(path_type=Path), metavar="FILE", help="Change what its call is answered.")
@click.option("--branches", type=click.IntRange(1, 1000), metavar="N", help="N branches, and N without the change.")
@click.option("--model", metavar="MODEL", help="Go on with this model: NAME@URL, or a TOML file.")
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
    step: int | None,
    set_reply: Path | None,
    files: tuple[str, ...],
    set_result: Path | None,
    branches: int | None,
    model: str | None,
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
    proctor replay runs/run-… fix-median --from 5 --set-reply reply.json --branches 10

    The task and its image must be what they were, by digest; else this is refused. Exit codes: 0 no difference;
    1 differences; 4 bad input; 5 refused; 6 infrastructure.
    """
    from proctor.cli import _replay

    if actions + model_calls + (step is not None) != 1:
        raise click.UsageError("say what to replay: --actions, --model-calls or --from STEP")
    changes = [bool(set_reply), bool(files), bool(set_result)]
    if step is None and (any(changes) or branches or model):
        raise click.UsageError("--set-reply, --write, --set-result, --branches and --model go with --from")
    if sum(changes) > 1:
        raise click.UsageError("change one thing: --set-reply, --write or --set-result")
    if step is not None:
        if repeat is not None or no_probe or strict:
            raise click.UsageError("--repeat, --no-probe and --strict go with --actions")
        change = _replay.change_of(set_reply, files, set_result)
        context.exit(
            _replay.branches(
                run, trial, step, change, tasks=tasks, output=output, count=branches or 1, model=model, as_json=as_json
            )
        )
    if model_calls:
        if repeat is not None or no_probe:
            raise click.UsageError("--repeat and --no-probe go with --actions")
        context.exit(_replay.model_calls(run, trial, tasks=tasks, output=output, strict=strict, as_json=as_json))
    if output is not None:
        raise click.UsageError("--actions makes no record, so there is nothing for --output")
    context.exit(
        _replay.actions(run, trial, tasks=tasks, repeat=repeat or 1, probe=not no_probe, strict=strict, as_json=as_json)
    )
