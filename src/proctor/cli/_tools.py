"""`proctor doctor --tools`: the tools of the built-in harnesses, and the kits of command-line agents, in an image."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import anyio
import click

from proctor.common import ConfigError, ProctorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proctor.agents.toolcheck import Outcome
    from proctor.sandbox.contract import Image
    from proctor.sandbox.images import ImageStore


def run(image: str, agents: Sequence[str], *, as_json: bool) -> int:
    """Check and print; the exit code: 0 when everything came out as it should, else 1."""
    outcomes = anyio.run(_check, image, agents)
    if as_json:
        click.echo(json.dumps({"version": 1, "image": image, "checks": [asdict(outcome) for outcome in outcomes]}))
    else:
        _print(image, outcomes)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


async def _check(ref: str, agents: Sequence[str]) -> list[Outcome]:
    from proctor import sandbox
    from proctor.agents.command_line import CommandLineAgent
    from proctor.agents.registry import load_harness
    from proctor.agents.toolcheck import check_tools
    from proctor.sandbox.images import ImageStore, ensure_image

    store = ImageStore()
    harnesses = [load_harness(name) for name in agents]
    for name, harness in zip(agents, harnesses, strict=True):
        if not isinstance(harness, CommandLineAgent):
            raise ConfigError(f"{name} is not a command-line agent", field="--agent",
                              remedy="the tools of the built-in harnesses are checked anyway")  # fmt: skip
    image = await ensure_image(ref, store=store, progress=lambda step, total, text: None)
    async with sandbox.create(sandbox.SandboxSpec(image=image)) as box:
        outcomes = await check_tools(box)
    for harness in harnesses:
        assert isinstance(harness, CommandLineAgent)
        outcomes.append(await _check_agent(harness, image, store))
    return outcomes


async def _check_agent(harness: object, image: Image, store: ImageStore) -> Outcome:
    """The agent's own probe, with its kit above the image."""
    from proctor import sandbox
    from proctor.agents.command_line import CommandLineAgent
    from proctor.agents.toolcheck import Outcome

    assert isinstance(harness, CommandLineAgent)
    what = f"{harness.version} runs and says so"
    try:
        layers = await harness.layers(store, lambda step, total, text: None)
        spec = sandbox.SandboxSpec(image=image, layers=layers, resources=sandbox.Resources(memory_mb=2048))
        async with sandbox.create(spec) as box:
            await harness.probe(box)
    except ProctorError as error:
        return Outcome(harness.name, what, error.line())
    return Outcome(harness.name, what)


def _print(image: str, outcomes: Sequence[Outcome]) -> None:
    width = max(len(outcome.tool) for outcome in outcomes)
    for outcome in outcomes:
        mark = click.style("ok    ", fg="green") if outcome.ok else click.style("broken", fg="red")
        click.echo(f"  {mark}  {outcome.tool:<{width}}  {outcome.what}")
        if not outcome.ok:
            click.echo(f"          {'':<{width}}  {outcome.problem}")
    broken = sum(not outcome.ok for outcome in outcomes)
    said = f"{broken} of {len(outcomes)} are broken" if broken else f"all {len(outcomes)} are as they should be"
    click.echo(f"in {image}: {said}")
