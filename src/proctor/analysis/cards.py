"""An analysis card: one trial for somebody who has a minute. Every statement points at the record, and is checked.

Who adds a statement (a rule here, a model elsewhere) does not matter: `checked` drops each one whose pointers do not
resolve, or whose quoted span is not at the place it points to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from proctor.analysis.comparison import as_plain
from proctor.analysis.observed import Pointer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proctor.analysis.causes import Judged
    from proctor.analysis.observed import Certainty, Observed

Resolve = Callable[[Pointer], str | None]
"""The text that stands at a pointer's place; None when there is no such place."""
_TASK_CHARS = 240


@dataclass(frozen=True, slots=True)
class Statement:
    """One sentence with its evidence. `source` is `rule`, or the name of the model that wrote it."""

    text: str
    certainty: Certainty
    evidence: tuple[Pointer, ...]
    source: str = "rule"


@dataclass(frozen=True, slots=True)
class Score:
    """The score block: tests of each group as (passed, of), what it took; None is unknown."""

    outcome: str
    verdict: str | None
    score: float | None
    target: tuple[int, int] | None
    kept: tuple[int, int] | None
    steps: int
    calls: int
    tokens: int | None
    cost_usd: float | None
    wall_s: float | None


@dataclass(frozen=True, slots=True)
class Card:
    """The card. `cause` is None for a resolved trial; `dropped` counts statements whose evidence did not hold."""

    trial: str
    run: str
    task: str
    agent: str
    asked: str
    """The task, by the first lines of its instruction."""
    verdict: str
    """One line: the outcome and the main issue."""
    cause: str | None
    certainty: Certainty | None
    right: tuple[Statement, ...]
    wrong: tuple[Statement, ...]
    score: Score
    dropped: int = 0
    conditions: tuple[tuple[str, int, int], ...] = ()
    """The same agent at the same task under each condition, plain first: name, resolved, graded. Empty without."""

    def as_json(self) -> dict[str, Any]:
        """The card as plain JSON values."""
        plain: dict[str, Any] = as_plain(asdict(self))
        return {"version": 1, **plain}


def make_card(judged: Judged) -> Card:
    """The card of a trial by rules alone. Its statements are not checked yet."""
    seen, cause = judged.seen, judged.cause
    issue = "resolved" if cause is None else f"{seen.outcome}, {cause.name}: {cause.text}"
    wrong = tuple(Statement(_sentence(one.text), one.certainty, one.evidence) for one in judged.signals)
    return Card(
        trial=seen.behaviour.trial,
        run=seen.behaviour.run,
        task=seen.behaviour.task,
        agent=seen.behaviour.agent,
        asked=_asked(seen.instruction),
        verdict=issue,
        cause=cause.name if cause else None,
        certainty=cause.certainty if cause else None,
        right=tuple(_right(seen)),
        wrong=wrong,
        score=_score(seen),
    )


def checked(card: Card, resolve: Resolve) -> Card:
    """The card with only those statements whose every pointer resolves to a place that holds its span."""
    sides = [tuple(one for one in side if holds(one, resolve)) for side in (card.right, card.wrong)]
    dropped = len(card.right) + len(card.wrong) - len(sides[0]) - len(sides[1])
    return replace(card, right=sides[0], wrong=sides[1], dropped=card.dropped + dropped)


def with_statements(card: Card, right: tuple[Statement, ...], wrong: tuple[Statement, ...], resolve: Resolve) -> Card:
    """The card with what somebody else found, a model say; what does not hold is dropped, and counted."""
    return checked(replace(card, right=card.right + right, wrong=card.wrong + wrong), resolve)


def holds(statement: Statement, resolve: Resolve) -> bool:
    """Whether there is evidence, all of it is where it is said to be, and each span is there word for word."""
    if not statement.evidence:
        return False
    for pointer in statement.evidence:
        found = resolve(pointer)
        if found is None or pointer.span not in found:
            return False
    return True


def _right(seen: Observed) -> Iterator[Statement]:
    passed = [index for index, test in enumerate(seen.tests) if test.ok and test.group == "fail_to_pass"]
    of = len(seen.group("fail_to_pass"))
    if passed:
        places = tuple(Pointer("grade.json", f"/tests/{index}", seen.tests[index].test_id) for index in passed[:3])
        yield Statement(f"{len(passed)} of {of} target tests pass.", "fact", places)
    kept = seen.group("pass_to_pass")
    if kept and all(test.ok for test in kept):
        yield Statement(
            f"All {len(kept)} tests that passed before still pass.", "fact", (Pointer("grade.json", "/tests"),)
        )
    checks = [action for action in seen.behaviour.actions if action.kind == "verify"]
    if checks:
        said = "the last one passed" if not checks[-1].failed else "the last one failed"
        yield Statement(
            f"It checked its work {len(checks)} times; {said}.", "heuristic", (Pointer.parse(checks[-1].evidence),)
        )
    if seen.changed:
        yield Statement(f"It changed {len(seen.changed)} paths.", "fact", (Pointer("diff.json", "/entries/0"),))


def _score(seen: Observed) -> Score:
    def group(name: str) -> tuple[int, int] | None:
        tests = seen.group(name)
        return (sum(test.ok for test in tests), len(tests)) if tests else None

    run = seen.behaviour
    return Score(seen.outcome, seen.verdict, run.score, group("fail_to_pass"), group("pass_to_pass"), seen.steps,
                 len(run.actions), run.tokens, run.cost_usd, run.wall_s)  # fmt: skip


def _asked(instruction: str) -> str:
    text = " ".join(instruction.split())
    return text if len(text) <= _TASK_CHARS else f"{text[: _TASK_CHARS - 1]}…"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def card_lines(card: Card) -> Iterator[str]:
    """The card for people."""
    yield f"{card.trial}: {card.verdict}" + (f" ({card.certainty})" if card.certainty else "")
    yield f"  asked: {card.asked}"
    for title, side in (("right", card.right), ("wrong", card.wrong)):
        for one in side:
            mark = "" if one.certainty == "fact" else " (heuristic)" if one.source == "rule" else f" ({one.source})"
            yield f"  {title}: {one.text}{mark} [{', '.join(map(str, one.evidence))}]"
    score = card.score
    parts = [f"score {'unknown' if score.score is None else f'{score.score:g}'}"]
    parts += [f"target {score.target[0]}/{score.target[1]}"] if score.target else []
    parts += [f"kept {score.kept[0]}/{score.kept[1]}"] if score.kept else []
    parts += [f"{score.steps} steps", f"{score.calls} calls"]
    parts += [f"{score.tokens:,} tokens"] if score.tokens is not None else []
    parts += [f"{score.wall_s:.1f} s"] if score.wall_s is not None else []
    yield f"  {', '.join(parts)}"
    if card.conditions:
        shown = ", ".join(f"{name} {won} of {graded}" for name, won, graded in card.conditions)
        yield f"  this task, resolved under: {shown}"
    if card.dropped:
        yield f"  {card.dropped} statements were dropped: their evidence did not hold"
