"""JSON on standard output, as every command prints it."""

from __future__ import annotations

from typing import Any


def echo_json(value: Any) -> None:
    """One indented document, ASCII, with a final newline."""
    import click

    from proctor.runs.formats import dump_json

    click.echo(dump_json(value, indent=1), nl=False)
