"""`proctor run`: an exam from tasks and agents to a graded record."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

SECTIONS = {
    "Who sits the exam": ("agents", "models", "gateway", "options", "predictions", "declaration"),
    "What is asked": ("select", "split", "attempts", "seed", "limits", "stop_when"),
    "What is changed": ("ablate", "perturb", "tool_faults", "faults", "condition"),
    "How it is isolated": ("runtime", "min_tier", "allow_network"),
    "How it is run": ("concurrency", "record_snapshots", "output", "resume", "as_json"),
}


class SectionedCommand(click.Command):
    """A command whose help lists its options under SECTIONS."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one block of options for each section, and the rest (`--help`) last."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {param.name: record for param in options if (record := param.get_help_record(ctx))}
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names])
        with formatter.section("Other"):
            formatter.write_dl(list(records.values()))


@click.command(cls=SectionedCommand)
@click.argument("tasks", nargs=-1, type=click.Path())
@click.option(
    "--agent",
    "agents",
    multiple=True,
    metavar="[LABEL=]NAME",
    help="oracle, null, scripted, tool-loop, text-loop, a command-line agent (mini-swe-agent, codex, claude-code, "
    "qwen-code, opencode, or the path of an agent.toml), or module.path:Class. Repeat it to compare.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="MODEL",
    help="NAME@URL of an OpenAI-compatible endpoint, or a TOML file, for the agents that need one.",
)
@click.option(
    "--gateway",
    type=click.Path(),
    metavar="FILE",
    help="A gateway's TOML file: upstreams, pins, limits, budgets. --model then takes names from it.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="[LABEL.]KEY=VALUE",
    help="An option of an agent. Without LABEL it is for every agent that takes KEY.",
)
@click.option(
    "--predictions",
    type=click.Path(),
    metavar="FILE",
    help="Grade the patches of a SWE-bench predictions file instead of running an agent.",
)
@click.option(
    "--plan",
    "declaration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A run.toml that declares all this: models x harnesses x tasks x attempts.",
)
@click.option("--task", "select", multiple=True, metavar="GLOB", help="Only the tasks whose name fits.")
@click.option("--split", type=click.Choice(["public", "held_out", "private"]), help="Only the tasks of this split.")
@click.option("--attempts", type=click.IntRange(1), default=1, show_default=True, help="Trials of an agent at a task.")
@click.option(
    "--condition",
    metavar="NAME",
    help="Run everything under this one name instead, all changes at once and without plain trials. Default: plain.",
)
@click.option(
    "--ablate",
    multiple=True,
    metavar="NAME",
    help="Also run with one thing given or taken away: an ablation that the tasks declare, a TOML file, or budget=2.",
)
@click.option(
    "--perturb",
    multiple=True,
    metavar="KIND[,KIND]",
    help="Also run with the instruction changed in form, not in meaning: whitespace, case, paraphrase, noise, order.",
)
@click.option(
    "--tool-faults",
    multiple=True,
    metavar="RATE[:KIND,…]",
    help="Also run with this share of tool calls made to fail, timeout or truncate, by the trial's seed.",
)
@click.option(
    "--faults",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="Also run with the network of the agent's sandbox slow or broken, by this document (docs/network.md).",
)
@click.option(
    "--allow-network",
    metavar="asked|FILE",
    help="Give tasks the network that they ask for, at most what the policy in FILE allows. Default: none.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The trials' seeds are derived from it.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="KEY=VALUE",
    help="total_s, tool_call_s, steps, tokens or cost_usd for each trial. Wins over what the task says.",
)
@click.option(
    "--stop-when",
    metavar="RULE",
    help="Stop as soon as the results suffice: difference[:alpha=0.05] or sprt:p0=0.6,p1=0.8.",
)
@click.option("--runtime", metavar="NAME", help="What runs the agent's sandbox: native (default), runsc or docker.")
@click.option(
    "--min-tier",
    metavar="TIER",
    help="Refuse to run the agent with less isolation: namespaces, namespaces-userns, gvisor.",
)
@click.option(
    "--record-snapshots",
    metavar="every|K",
    help="Keep the sandbox's disk before every (K-th) step, to branch off there: proctor replay --from STEP.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    metavar="N",
    help="Trials at a time. Default: two for each core. Never more than fit on the machine.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the record goes. Default: runs/<run id>.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Go on with a run: what it planned and has not scored. Takes only --concurrency and --json beside it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; progress goes to stderr.")
@click.pass_context
def run(
    context: click.Context,
    /,
    *,
    concurrency: int | None,
    output: Path | None,
    resume: Path | None,
    declaration: Path | None,
    as_json: bool,
    **asked: object,
) -> None:
    """Run an exam: every agent at every task, each trial in a sandbox of its own, graded in a clean room, on record.

    TASKS are task directories, folders of them, dataset.toml files, or SWE-bench rows (JSON, JSONL, CSV, Parquet).

    \b
    proctor run examples/demo --agent oracle --agent null
    proctor run examples/demo --agent tool-loop --model NAME@http://127.0.0.1:8000/v1
    proctor run --plan run.toml
    proctor run --resume runs/run-…

    Exit codes: 0 the run is complete, whatever the scores; 4 bad input; 5 refused; 6 some trials ended as infra_error
    or verifier_error; 130 interrupted (go on with --resume).
    """
    from proctor.runs.session import Session

    given = [name for name in asked if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if resume is not None:
        if given or output is not None or declaration is not None:
            raise click.UsageError("--resume takes everything from the run itself; give only --concurrency and --json")
        session = Session.resume(resume)
    elif declaration is not None:
        from proctor.runs.declaration import read_declaration

        if given:
            raise click.UsageError(
                "--plan takes everything from its file; give only --output, --concurrency and --json"
            )
        session = Session.new(read_declaration(declaration), output)
    else:
        from proctor.runs.request import Request

        session = Session.new(Request(sources=asked.pop("tasks"), **asked), output)  # type: ignore[arg-type]
    context.exit(session.run(concurrency=concurrency, as_json=as_json))
