"""The exam session: plans, trials, the ledger, records, resume.

What is heavy is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proctor.runs.engine import execute
    from proctor.runs.ledger import read_ledger, verify_ledger
    from proctor.runs.outcome import Outcome
    from proctor.runs.plan import AgentSpec, RunPlan, TrialPlan
    from proctor.runs.request import Request, plan_request
    from proctor.runs.session import Session
    from proctor.runs.summary import RunView, read_run, summarise

__all__ = [
    "AgentSpec",
    "Outcome",
    "Request",
    "RunPlan",
    "RunView",
    "Session",
    "TrialPlan",
    "execute",
    "plan_request",
    "read_ledger",
    "read_run",
    "summarise",
    "verify_ledger",
]

_HOMES = {
    "AgentSpec": "plan",
    "Outcome": "outcome",
    "Request": "request",
    "RunPlan": "plan",
    "RunView": "summary",
    "Session": "session",
    "TrialPlan": "plan",
    "execute": "engine",
    "plan_request": "request",
    "read_ledger": "ledger",
    "read_run": "summary",
    "summarise": "summary",
    "verify_ledger": "ledger",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
