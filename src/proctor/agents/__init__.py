"""The candidate: harnesses, the room they act in, and the limits that end them.

`run_harness` runs one; `load_harness` finds one by name or import path.
"""

from proctor.agents.contract import (
    AgentResult,
    Harness,
    HarnessContext,
    Recorder,
    Room,
    Step,
    StopReason,
    ToolCall,
)
from proctor.agents.limits import LimitGuard, LimitReached
from proctor.agents.registry import HARNESSES, load_harness
from proctor.agents.room import BoundedRoom, RoomEvent
from proctor.agents.runner import run_harness

__all__ = [
    "HARNESSES",
    "AgentResult",
    "BoundedRoom",
    "Harness",
    "HarnessContext",
    "LimitGuard",
    "LimitReached",
    "Recorder",
    "Room",
    "RoomEvent",
    "Step",
    "StopReason",
    "ToolCall",
    "load_harness",
    "run_harness",
]
