"""Trajectories as other tools write them: ATIF, the formats that are imported, and OpenTelemetry spans.

    for found in import_file(Path("astropy-1.traj.json")):
        print(found.format, len(found.trajectory.steps), *found.losses, sep="\\n")

What is heavy is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proctor.trajectories.atif import Trajectory, dump_trajectory, parse_trajectory, read_trajectory

__all__ = ["Trajectory", "dump_trajectory", "parse_trajectory", "read_trajectory"]

_HOMES = {name: "atif" for name in ("Trajectory", "dump_trajectory", "parse_trajectory", "read_trajectory")}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
