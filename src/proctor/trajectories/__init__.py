"""Trajectories as other tools write them: ATIF, the formats that are imported, and OpenTelemetry spans.

    for found in import_file(Path("astropy-1.traj.json")):
        print(found.format, len(found.trajectory.steps), *found.losses, sep="\\n")

What is heavy is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proctor.trajectories.atif import Trajectory, dump_trajectory, parse_trajectory, read_trajectory
    from proctor.trajectories.draft import Imported
    from proctor.trajectories.importer import import_document, import_file
    from proctor.trajectories.otel import export_spans

__all__ = [
    "Imported",
    "Trajectory",
    "dump_trajectory",
    "export_spans",
    "import_document",
    "import_file",
    "parse_trajectory",
    "read_trajectory",
]

_HOMES = {
    "Imported": "draft",
    "Trajectory": "atif",
    "dump_trajectory": "atif",
    "export_spans": "otel",
    "import_document": "importer",
    "import_file": "importer",
    "parse_trajectory": "atif",
    "read_trajectory": "atif",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
