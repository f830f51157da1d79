"""The candidate: harnesses, the room they act in, and the limits that end them.

    result = await run_harness(load_harness("oracle"), sandbox=box, task=task, recorder=recorder, limits=limits)

What is heavy is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.agents.contract import (
    AgentResult,
    Harness,
    HarnessContext,
    InstalledHarness,
    ModelEndpoint,
    Recorder,
    Room,
    Step,
    StopReason,
    ToolCall,
)
from proctor.agents.registry import HARNESSES, load_harness

if TYPE_CHECKING:
    from proctor.agents.limits import LimitGuard, LimitReached
    from proctor.agents.room import BoundedRoom, RoomEvent
    from proctor.agents.runner import run_harness

__all__ = [
    "HARNESSES",
    "AgentResult",
    "BoundedRoom",
    "Harness",
    "HarnessContext",
    "InstalledHarness",
    "LimitGuard",
    "LimitReached",
    "ModelEndpoint",
    "Recorder",
    "Room",
    "RoomEvent",
    "Step",
    "StopReason",
    "ToolCall",
    "load_harness",
    "run_harness",
]

_LAZY = {
    "BoundedRoom": "proctor.agents.room",
    "LimitGuard": "proctor.agents.limits",
    "LimitReached": "proctor.agents.limits",
    "RoomEvent": "proctor.agents.room",
    "run_harness": "proctor.agents.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
