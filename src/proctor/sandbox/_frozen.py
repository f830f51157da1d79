"""Frozen uppers: read-only layers that live as long as somebody uses them, and never longer than their Edge.

A frozen upper is a directory in a file system without a name (a detached tmpfs or loop mount). Its descriptor keeps it
alive; closing the descriptor frees everything in it at once, however large it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from proctor.common import RefusedError
from proctor.sandbox.contract import Layer
from proctor.sandbox.layers import usage


@dataclass(slots=True)
class _Frozen:
    layer: Layer
    descriptor: int
    mount: int
    """The descriptor that the file system was made with: when its last copy is closed, the kernel dissolves the mount,
    and the other one can be read but no longer stacked."""
    kept: bool
    in_memory: bool
    place: Path | None
    """Where it is on the machine, if it has a path there; then it is stacked by that, not by its descriptor."""
    users: int = 0


class FrozenLayers:
    """The frozen uppers of one Edge, by handle."""

    def __init__(self, edge_id: str) -> None:
        self._edge_id = edge_id
        self._count = 0
        self._layers: dict[str, _Frozen] = {}

    def add(
        self,
        upper: int,
        mount: int,
        *,
        kept: bool,
        in_memory: bool,
        place: Path | None = None,
        size_bytes: int | None = None,
    ) -> Layer:
        """Freeze the open directory `upper` of the file system `mount`; both descriptors are owned from now on.

        With `kept` it lives until `drop`; otherwise until the last sandbox that uses it has ended.
        """
        self._count += 1
        handle = f"{self._edge_id}/layer-{self._count}"
        size = usage(upper)[0] if size_bytes is None else size_bytes
        layer = Layer(path=Path(f"/proc/{os.getpid()}/fd/{upper}"), handle=handle, size_bytes=size)
        self._layers[handle] = _Frozen(layer, upper, mount, kept, in_memory, place)
        return layer

    def stacked(self, layer: Layer) -> Path | int:
        """What a runtime stacks: the path of a layer, or the open directory of one that has none."""
        if layer.handle is None:
            return layer.path
        return self._get(layer).place or self._get(layer).descriptor

    def _get(self, layer: Layer) -> _Frozen:
        """Refuses a layer that this Edge does not hold."""
        frozen = self._layers.get(layer.handle or "")
        if frozen is None:
            raise RefusedError(
                f"frozen layer {layer.handle} is not held by this Edge",
                field="layers",
                remedy="a frozen layer lives only as long as the Edge that made it",
            )
        return frozen

    def __len__(self) -> int:
        return len(self._layers)

    def memory_mb(self) -> int:
        """Memory that frozen layers hold: no sandbox's limit covers it any more."""
        sizes = (frozen.layer.size_bytes or 0 for frozen in self._layers.values() if frozen.in_memory)
        return sum(sizes) >> 20

    def use(self, layers: tuple[Layer, ...]) -> None:
        """A sandbox starts to depend on these layers."""
        for layer in layers:
            if layer.handle is not None:
                self._get(layer).users += 1

    def release(self, layers: tuple[Layer, ...]) -> list[int]:
        """A sandbox depends on these layers no longer. Returns descriptors to close (it may take long)."""
        freed = []
        for layer in layers:
            if layer.handle is not None and (frozen := self._layers.get(layer.handle)) is not None:
                frozen.users -= 1
                freed += self._free(frozen)
        return freed

    def drop(self, layer: Layer) -> list[int]:
        """Its maker needs it no longer; it goes when the last user does. Returns descriptors to close."""
        frozen = self._layers.get(layer.handle or "")
        if frozen is None:
            return []
        frozen.kept = False
        return self._free(frozen)

    def close(self) -> list[int]:
        """Forget all; returns descriptors to close."""
        descriptors = [one for frozen in self._layers.values() for one in (frozen.descriptor, frozen.mount)]
        self._layers.clear()
        return descriptors

    def _free(self, frozen: _Frozen) -> list[int]:
        if frozen.kept or frozen.users > 0:
            return []
        assert frozen.layer.handle is not None
        del self._layers[frozen.layer.handle]
        return [frozen.descriptor, frozen.mount]
