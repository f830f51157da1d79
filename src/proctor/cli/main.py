"""The `proctor` command: verbs are loaded only when they are used, so `--help` stays fast."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

# verb: (module, attribute, one line of help). At most 12.
VERBS: dict[str, tuple[str, str, str]] = {
    "run": ("proctor.cli.run", "run", "Run an exam: tasks x agents x attempts, graded and recorded."),
    "show": ("proctor.cli.show", "show", "Show a run as a table, or one trial as a readable story."),
    "replay": (
        "proctor.cli.replay",
        "replay",
        "Do a trial again: its actions, its model's answers, a branch.",
    ),
    "compare": ("proctor.cli.compare", "compare", "Compare agents, paired by task; a gate for CI."),
    "report": ("proctor.cli.report", "report", "Write a report on runs: one page, or Markdown, JSON, CSV, JUnit."),
    "plan": ("proctor.cli.plan", "plan", "What a comparison or an audit takes: tasks, attempts, cost."),
    "task": ("proctor.cli.task", "task", "Check and import tasks and datasets."),
    "box": ("proctor.cli.box", "box", "Use a sandbox by itself: run, exec, shell, net, ls, rm."),
    "image": ("proctor.cli.image", "image", "Build, import, list and remove images."),
    "serve": ("proctor.cli.serve", "serve", "Serve a part by itself: the model gateway."),
    "doctor": ("proctor.cli.doctor", "doctor", "What this machine can do, tier by tier, and what to install."),
}


ANALYSIS_EXTRA = frozenset({"jinja2", "numpy", "polars", "scipy", "statsmodels"})
"""Packages that only the statistician needs; running exams does not."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are invoked; their help lines live in VERBS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, attribute, _ = VERBS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, _, text) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="proctor")
def cli() -> None:
    """Proctor examines AI agents: real sandboxes, clean-room grading, records that can be trusted.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 inconclusive, 4 bad input, 5 refused, 6 infrastructure, 130 interrupted.
    """


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: Proctor's own errors become one line on stderr and a documented exit code."""
    from proctor.common.errors import ExitCode, ProctorError

    try:
        return cli.main(args=arguments, prog_name="proctor", standalone_mode=False) or 0
    except ModuleNotFoundError as error:
        if error.name not in ANALYSIS_EXTRA:
            raise
        click.echo(f"proctor: {error.name} is not installed (pip install 'proctor[analysis]')", err=True)
        return int(ExitCode.REFUSED)
    except ProctorError as error:
        click.echo(f"proctor: {error.line()}", err=True)
        return int(error.exit_code)
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("proctor: interrupted", err=True)
        return int(ExitCode.INTERRUPTED)


def entry() -> None:
    """`python -m proctor` and the console script."""
    sys.exit(main())
