"""Who wrote the reward: watched from the host while the verifier runs. (The watcher itself is in `_fanotify`.)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from proctor.grading.contract import GradeFinding

if TYPE_CHECKING:
    from proctor.sandbox.contract import Sandbox


class RewardGuard:
    """Watches writes to a directory of a room. Use as an async context manager around the verifier's run."""

    def __init__(self, box: Sandbox, directory: str) -> None:
        self._box = box
        self._directory = directory

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def findings(self) -> list[GradeFinding]:
        """What was seen; a `reward-writer` finding means that the reward must not be believed."""
        return [GradeFinding("unguarded", "writers of the reward file were not watched on this machine")]
