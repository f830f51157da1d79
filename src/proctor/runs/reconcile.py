"""What an agent says that it did, held against what the host saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.runs.formats import FindingEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proctor.agents.contract import Step


def account_differs(steps: Iterable[Step], answered: int) -> FindingEntry | None:
    """A note when an agent in the sandbox tells of another number of answers than passed the gateway; None when the two
    agree, or when it tells nothing. `answered` counts calls that were not errors.

    A note and no more: programs also ask for titles and summaries, and leave them out of their transcripts.
    """
    told = sum(step.llm_calls for step in steps if step.extra.get("told_by") == "agent")
    if not told or told == answered:
        return None
    detail = f"its transcript has {told} answers of the model, and {answered} passed the gateway"
    return FindingEntry(kind="account-differs", detail=detail, severity="note", source="transcript")
