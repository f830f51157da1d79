"""`proctor doctor --isolation`: the isolation self-test of the runtimes of this machine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

import anyio
import click

from proctor.common import ProctorError
from proctor.sandbox.selftest import VERSION, Line
from proctor.sandbox.selftest import examine as run_self_test

if TYPE_CHECKING:
    from proctor.sandbox.contract import Runtime

_COLOURS = {"green": "green", "red": "red", "n/a": "yellow"}


def examine(runtimes: tuple[Runtime, ...], every: tuple[Runtime, ...], *, as_json: bool) -> bool:
    """Print one line for each item of each runtime; True when none is red.

    Without `runtimes` those of `every` that do not work here are named and passed over; one that was asked for has to
    work.
    """
    return anyio.run(_examine, runtimes, every, as_json)


async def _examine(runtimes: tuple[Runtime, ...], every: tuple[Runtime, ...], as_json: bool) -> bool:
    document: dict[str, object] = {}
    good, worked = True, False
    for runtime in runtimes or every:
        lines: list[Line] = []
        if not as_json:
            click.echo(click.style(f"container/{runtime}", bold=True))
        try:
            async for line in run_self_test(runtime):
                lines.append(line)
                if not as_json:
                    _print(line)
        except ProctorError as error:
            good = good and not runtimes
            document[runtime] = {"works": False, "reason": error.message}
            if not as_json:
                click.echo(f"  does not work here: {error.message}")
            continue
        worked = True
        counts = Counter(line.status for line in lines)
        good = good and not counts["red"]
        document[runtime] = {"works": True, "counts": counts, "items": [asdict(line) for line in lines]}
        if not as_json:
            click.echo(f"  {counts['green']} green, {counts['red']} red, {counts['n/a']} not applicable")
    if as_json:
        click.echo(json.dumps({"version": VERSION, "runtimes": document}))
    return good and worked


def _print(line: Line) -> None:
    mark = click.style(f"{line.status:<5}", fg=_COLOURS[line.status])
    click.echo(f"  {line.number:>2}  {mark}  {line.title}: {line.evidence}")
