"""`proctor doctor --conformance`: the suite of checks, run against the runtimes of this machine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

import anyio
import click

from proctor.common import ProctorError
from proctor.sandbox.conformance import run_checks
from proctor.sandbox.runtimes.capabilities import CAPABILITIES

if TYPE_CHECKING:
    from proctor.sandbox.conformance import Outcome
    from proctor.sandbox.contract import Runtime

_COLOURS = {"passed": "green", "failed": "red", "skipped": "yellow"}


def examine(runtimes: tuple[Runtime, ...], *, as_json: bool) -> bool:
    """Print one line for each check of each runtime; True when nothing failed.

    Without `runtimes` those that do not work here are named and passed over; one that was asked for has to work.
    """
    return anyio.run(_examine, runtimes, as_json)


async def _examine(runtimes: tuple[Runtime, ...], as_json: bool) -> bool:
    document: dict[str, object] = {}
    good = True
    for runtime in runtimes or CAPABILITIES:
        outcomes: list[Outcome] = []
        if not as_json:
            click.echo(click.style(str(runtime), bold=True))
        try:
            async for outcome in run_checks(runtime):  # type: ignore[arg-type]
                outcomes.append(outcome)
                if not as_json:
                    _print(outcome)
        except ProctorError as error:
            good = good and not runtimes
            document[runtime] = {"works": False, "reason": error.message}
            if not as_json:
                click.echo(f"  does not work here: {error.message}")
            continue
        counts = Counter(outcome.status for outcome in outcomes)
        good = good and not counts["failed"]
        document[runtime] = {"works": True, "counts": counts, "checks": [asdict(outcome) for outcome in outcomes]}
        if not as_json:
            click.echo(f"  {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if as_json:
        click.echo(json.dumps({"version": 1, "runtimes": document}))
    return good


def _print(outcome: Outcome) -> None:
    mark = click.style(f"{outcome.status:<7}", fg=_COLOURS[outcome.status])
    click.echo(f"  {mark}  {outcome.check}: {outcome.detail or outcome.claim}")
