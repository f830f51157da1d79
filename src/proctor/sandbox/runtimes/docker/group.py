"""The control groups that the engine made for a container, read as the Edge reads its own: they are kernel evidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proctor.sandbox.contract import LaunchError
from proctor.sandbox.native.cgroup import CgroupLayout, SlotGroup


@dataclass(frozen=True, slots=True)
class EngineGroup(SlotGroup):
    """Groups by path instead of by slot."""

    paths: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, pid: int, name: str) -> EngineGroup:
        """The groups of the process `pid`. Raises LaunchError when it is gone already."""
        layout = CgroupLayout.detect()
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError as error:
            raise LaunchError(f"container {name} ended at once") from error
        own = {tuple(line.split(":", 2)[1].split(",")): line.split(":", 2)[2] for line in lines}
        paths = []
        for controller, mount in layout.controllers.items():
            below = next((path for names, path in own.items() if controller in names), own.get(("",), "/"))
            paths.append((controller, f"{mount}{below}"))
        return cls(layout, "", name, tuple(paths))

    def directory(self, controller: str) -> Path | None:
        """The container's directory in the tree of `controller`."""
        found = dict(self.paths).get(controller)
        return None if found is None else Path(found)

    def _below(self, controller: str) -> str:
        return dict(self.paths)[controller]
