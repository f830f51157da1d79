"""Programs that an ablation puts into the agent's sandbox: a layer of their own, made once for each task and condition.

They are below what the agent changes, so they are in no diff, are not carried into grading, and are not its work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from proctor.common import ConfigError
from proctor.sandbox.contract import FileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proctor.sandbox import Edge
    from proctor.sandbox.contract import Layer, Sandbox, SandboxSpec


class Equipment:
    """The layers of one run. They live as long as its Edge."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._layers: dict[tuple[object, ...], Layer] = {}
        self._lock = anyio.Lock()

    async def layer(self, spec: SandboxSpec, programs: Sequence[tuple[str, bytes]]) -> Layer:
        """The layer that holds these programs, executable for everybody, above the image of `spec`."""
        image = spec.image if isinstance(spec.image, str) else spec.image.digest
        key = (image, *programs)
        async with self._lock:
            if key not in self._layers:
                box = await self._edge.create(replace(spec, labels={**spec.labels, "role": "equipment"}))
                try:
                    for path, content in programs:
                        await _place(box, path, content)
                    self._layers[key] = await box.snapshot()
                finally:
                    with anyio.CancelScope(shield=True):
                        await box.close()
            return self._layers[key]


async def _place(box: Sandbox, path: str, content: bytes) -> None:
    try:
        await box.write(path, content, mode=0o755)
    except FileError as error:
        raise ConfigError(f"cannot be written in this image: {error.message}", field=f"ablation: {path}",
                          remedy="give another path, such as /opt/exam/NAME") from error  # fmt: skip
