"""Before the first clock starts: every task's image, built or fetched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proctor.agents.contract import InstalledHarness
from proctor.agents.registry import load_harness
from proctor.common import InfraError
from proctor.runs.lock import ImageFact
from proctor.runs.outcome import describe
from proctor.sandbox.contract import ImageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.runs.plan import RunPlan
    from proctor.runs.progress import Progress
    from proctor.sandbox.contract import Image, Layer
    from proctor.sandbox.images import ImageStore
    from proctor.sandbox.images import Progress as ImageProgress

HISTORY = "history:"
"""The labels of an image in which `proctor.tasks.environment` proves the history of a repository, by its path."""


@dataclass(frozen=True, slots=True)
class AgentKit:
    """What an agent that runs in the sandbox brings: layers above the task's image, and the memory that its own program
    needs beyond what the task allows for the work."""

    layers: tuple[Layer, ...] = ()
    memory_mb: int = 0


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that trials start from. `missing` says why an image could not be had."""

    rooms: Mapping[str, Image]
    missing: Mapping[str, str] = field(default_factory=dict)
    kits: Mapping[str, AgentKit] = field(default_factory=dict)
    """What agents bring, by the agent's label."""

    @property
    def kit_digests(self) -> dict[str, list[str]]:
        """Their layers, as the lock names them."""
        return {label: [layer.digest or "" for layer in kit.layers] for label, kit in self.kits.items()}

    @property
    def images(self) -> dict[str, ImageFact]:
        """The images by task, as the lock names them."""
        return {name: _fact(image) for name, image in self.rooms.items()}


def _fact(image: Image) -> ImageFact:
    proofs = {
        label.removeprefix(HISTORY): text for label, text in sorted(image.labels.items()) if label.startswith(HISTORY)
    }
    return ImageFact(image.ref, image.digest, proofs)


async def prepare_all(plan: RunPlan, progress: Progress) -> Preparation:
    """Prepare the image of every task. Bad input and refusals are raised; an image that could not be had is
    remembered, and its trials end as `infra_error`, so that one dead download does not stop the rest.

    Raises InfraError when no image could be had at all.
    """
    from proctor.sandbox import ImageStore
    from proctor.tasks.environment import prepare

    store = ImageStore()
    rooms: dict[str, Image] = {}
    missing: dict[str, str] = {}
    for entry in plan.entries:
        name = entry.task.name
        try:
            rooms[name] = await prepare(entry.task, store=store, progress=_steps_of(name, progress))
        except (InfraError, ImageError, TimeoutError) as error:
            missing[name] = describe(error)
            progress.note(f"{name}: no image: {missing[name]}")
    if not rooms:
        raise InfraError(f"no task has an image: {next(iter(missing.values()))}", remedy="see proctor doctor")
    return Preparation(rooms, missing, await prepare_kits(plan, store, progress))


async def prepare_kits(plan: RunPlan, store: ImageStore, progress: Progress) -> dict[str, AgentKit]:
    """The toolkit of every agent that brings one. Without it an agent cannot run at all, so a failure is raised."""
    kits: dict[str, AgentKit] = {}
    for agent in plan.agents:
        if agent.injected and isinstance(harness := load_harness(agent.ref), InstalledHarness):
            layers = await harness.layers(store, _steps_of(agent.label, progress))
            kits[agent.label] = AgentKit(layers, harness.memory_mb)
    return kits


def _steps_of(name: str, progress: Progress) -> ImageProgress:
    """One note for each step of a build; its output lines are the image room's business."""
    seen: set[tuple[int, int]] = set()

    def report(step: int, total: int, text: str) -> None:
        if (step, total) not in seen:
            seen.add((step, total))
            progress.preparing(f"{name}: {text} ({step}/{total})")

    return report
