"""Asking a model to add to cards: what it is shown of a record, and what becomes of its answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.analysis.cards import card_lines
from proctor.analysis.citations import INSTRUCTIONS, add_statements
from proctor.common import ConfigError
from proctor.models.contract import ModelError
from proctor.runs.failures import Resolver, card_of
from proctor.trajectories.atif import read_trajectory, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proctor.analysis.cards import Card
    from proctor.analysis.causes import Judged
    from proctor.models.contract import ModelClient

SHOWN_CHARS = 60_000
"""Of a record, a model is shown at most so much: the first and the last steps."""
_PIECE_CHARS = 1_500
_AT_ONCE = 4


@dataclass(slots=True)
class Explained:
    """Cards with what a model added. `failed` are trials for which no answer came, with the reason."""

    cards: list[Card] = field(default_factory=list)
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    tokens: int | None = 0


async def explain(judged: Sequence[Judged], client: ModelClient) -> Explained:
    """Ask for statements on each trial that has a record and a cause, a few at a time, in the order given."""
    found = Explained()
    cards: dict[int, Card] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def one(number: int, trial: Judged) -> None:
        card, record = card_of(trial), trial.seen.behaviour.record
        cards[number] = card
        if record is None:
            return
        async with limiter:
            try:
                answer = await client.complete(messages(card, Path(record)))
            except (ModelError, ConfigError) as error:
                found.failed[card.trial] = error.line()
                return
        added = add_statements(
            card, answer.text, Resolver(Path(record)), model=answer.returned_model or client.spec.name
        )
        cards[number] = added.card
        found.kept += added.kept
        found.dropped.update(added.dropped)
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        known = found.tokens is not None and None not in usage
        found.tokens = (found.tokens or 0) + sum(part or 0 for part in usage) if known else None

    async with anyio.create_task_group() as group:
        for number, trial in enumerate(judged):
            if trial.cause is not None:
                group.start_soon(one, number, trial)
    found.cards = [cards[number] for number in sorted(cards)]
    return found


def messages(card: Card, record: Path) -> list[dict[str, str]]:
    """What the model is asked: the card of the rules, then pieces of the record under their places."""
    pieces = list(_pieces(record))
    half, head, tail = SHOWN_CHARS // 2, [], list[str]()
    size = 0
    while pieces and size + len(pieces[0]) <= half:
        size += len(pieces[0])
        head.append(pieces.pop(0))
    size = 0
    while pieces and size + len(pieces[-1]) <= half:
        size += len(pieces[-1])
        tail.insert(0, pieces.pop())
    gap = [f"({len(pieces)} pieces in between are left out)"] if pieces else []
    text = "\n\n".join(["\n".join(card_lines(card)), *head, *gap, *tail])
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": text}]


def _pieces(record: Path) -> Iterator[str]:
    trajectory = read_trajectory(record / "trajectory.json")
    for index, step in enumerate(trajectory.steps):
        if step.source != "system" and (said := text_of(step.message)):
            yield _piece(f"trajectory.json#/steps/{index}/message", said)
        for number, call in enumerate(step.tool_calls or ()):
            place = f"trajectory.json#/steps/{index}/tool_calls/{number}/arguments"
            yield _piece(place, json.dumps(call.arguments, ensure_ascii=False))
        for number, result in enumerate(step.observation.results if step.observation else ()):
            if isinstance(result.content, str):
                yield _piece(f"trajectory.json#/steps/{index}/observation/results/{number}/content", result.content)
    for name, place in (("grade.json", "/tests"), ("grade.json", "/error"), ("diff.json", "/entries"),
                        ("findings.json", "/findings"), ("result.json", "/final_message")):  # fmt: skip
        try:
            value = json.loads((record / name).read_bytes())[place[1:]]
        except (OSError, ValueError, LookupError):
            continue
        if value:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield _piece(f"{name}#{place}", shown)


def _piece(place: str, text: str) -> str:
    half = _PIECE_CHARS // 2
    if len(text) > 2 * half:
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return f"[{place}]\n{text}"
