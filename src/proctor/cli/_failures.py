"""`proctor show RUN [TRIAL] --failures`: why trials failed, as an account and as cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import polars as pl

    from proctor.runs.explaining import Explained
    from proctor.runs.failures import Failures


def show_failures(run: Path, trial: str | None, *, as_json: bool, model: str | None = None, most: int = 20) -> None:
    """Judge the trials of a run, or one of them, and print the account and the cards of what was not resolved. A
    `model` may add statements to the first `most` cards."""
    import click

    from proctor.analysis.cards import card_lines
    from proctor.cli._show import end
    from proctor.common.text import visible
    from proctor.runs.failures import card_of, read_failures
    from proctor.runs.frame import load_trials

    read = load_trials([run])
    trials, damage = read.trials.collect(), read.inputs[0].damage
    if trial is None:
        found = read_failures(trials)
        cards = found.cards()
    else:
        found = read_failures(_only(trials["trial_id"].to_list(), trial, trials))
        cards = tuple(card_of(one) for one in found.judged)
    explained = None
    if model is not None:
        explained = _explain(found, model, most)
        by_id = {(card.run, card.trial): card for card in explained.cards}
        cards = tuple(by_id.get((card.run, card.trial), card) for card in cards)
    if as_json:
        from proctor.cli._json import echo_json

        document = {"version": 1, "account": _account(found), "cards": [card.as_json() for card in cards]}
        if explained is not None:
            document["model"] = {name: getattr(explained, name) for name in ("kept", "dropped", "failed", "tokens")}
        echo_json(document)
        end(run, damage)
        return
    if trial is None:
        _print_account(found)
    for card in cards:
        click.echo()
        for line in card_lines(card):
            click.echo(visible(line))
    if explained is not None:
        click.echo()
        for line in _explained_lines(explained, model or ""):
            click.echo(visible(line))
    end(run, damage)


def _explain(found: Failures, model: str, most: int) -> Explained:
    import anyio

    from proctor.models.client import OpenAIChatClient
    from proctor.models.spec import load_model
    from proctor.runs.explaining import explain

    client = OpenAIChatClient(load_model(model))
    unresolved = [one for one in found.judged if one.cause is not None][:most]

    async def ask() -> Explained:
        try:
            return await explain(unresolved, client)
        finally:
            await client.aclose()

    return anyio.run(ask)


def _explained_lines(explained: Explained, model: str) -> Iterator[str]:
    """What became of the model's answers: what was dropped is said as loudly as what stayed."""
    tokens = "unknown" if explained.tokens is None else f"{explained.tokens:,}"
    dropped = sum(explained.dropped.values())
    name = model.rpartition("@http")[0] or model
    yield f"{name}: {explained.kept} statements hold, {dropped} were dropped; {tokens} tokens"
    for reason, count in explained.dropped.most_common():
        yield f"  dropped {count}: {reason}"
    for trial, reason in explained.failed.items():
        yield f"  no answer on {trial}: {reason}"


def _only(ids: list[str], wanted: str, trials: pl.DataFrame) -> pl.DataFrame:
    """The row of the one trial that is called so, or whose id holds the text."""
    import polars as pl

    from proctor.common import ConfigError

    exact = [one for one in ids if one == wanted] or [one for one in ids if wanted in one]
    if len(exact) != 1:
        what = "no trial" if not exact else f"{len(exact)} trials"
        raise ConfigError(f"{what} of this run fit", field=wanted, remedy="give a whole id, as the ledger has it")
    return trials.filter(pl.col("trial_id") == exact[0])


def _account(found: Failures) -> dict[str, Any]:
    told = found.account
    return {
        "planned": told.planned,
        "counts": told.counts,
        "by_agent": told.by_agent,
        "by_outcome": told.by_outcome,
        "signals": told.signals,
        "reconciles": told.reconciles,
        "unread": found.unread,
    }


def _print_account(found: Failures) -> None:
    """Causes x agents, with the sum that is what was planned."""
    from rich.table import Table
    from rich.text import Text

    from proctor.analysis.causes import MEANINGS
    from proctor.runs.table import console

    told, out = found.account, console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("primary cause")
    agents = list(told.by_agent)
    for agent in agents:
        table.add_column(Text(agent), justify="right")
    table.add_column("all", justify="right")
    table.add_column("meaning", overflow="fold")
    for name, count in told.counts.items():
        counts = [str(told.by_agent[agent].get(name, 0)) for agent in agents]
        table.add_row(name, *counts, str(count), MEANINGS.get(name, ""))
    sums = [str(sum(told.by_agent[agent].values())) for agent in agents]
    table.add_row("planned", *sums, str(told.planned), "" if told.reconciles else "does not add up: a defect")
    out.print(table)
    if found.unread:
        out.print(f"{found.unread} trials are judged by their outcome alone: their records cannot be read")
