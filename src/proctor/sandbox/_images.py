"""Images an Edge uses: resolved once, and held so that no prune can take their layers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox.contract import Image, Layer

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox.images import Hold, ImageStore
    from proctor.sandbox.images.eviction import Usage

_TOUCH_EVERY_S = 60.0


class ImageCache:
    """References resolved through the image store. A reference that is moved is seen at the next create."""

    def __init__(self, store: ImageStore | None) -> None:
        self._store = store
        self._known: dict[str, tuple[object, Image, Hold]] = {}
        self._others: Hold | None = None
        self._touched: dict[str, float] = {}

    async def resolve(self, image: str | Image) -> Image:
        """The image for a reference; an Image is taken as it is. Raises ImageError."""
        if isinstance(image, Image):
            return image
        stamp = self._stamp()
        known = self._known.get(image)
        if known is not None and known[0] == stamp:
            self._touch(known[1])
            return known[1]
        found, hold = await anyio.to_thread.run_sync(self._resolve, image)
        if (old := self._known.pop(image, None)) is not None and old[1].digest == found.digest:
            hold.close()
            hold = old[2]
        self._known[image] = (self._stamp(), found, hold)
        return found

    def hold(self, layers: tuple[Layer, ...]) -> None:
        """Keep stored layers that came by another way than a reference (toolkits, an Image by value)."""
        if self._others is None:
            from proctor.sandbox.images import Hold

            self._others = Hold()
        for layer in layers:
            if layer.digest is not None:
                self._others.take(layer.path)

    def _touch(self, image: Image) -> None:
        """For eviction, a minute is exact enough."""
        at = time.monotonic()
        if at - self._touched.get(image.digest, float("-inf")) > _TOUCH_EVERY_S:
            self._touched[image.digest] = at
            self._open().touch(image.digest)

    def _resolve(self, ref: str) -> tuple[Image, Hold]:
        store = self._open()
        image = store.resolve(ref)
        return image, store.hold(image)

    def _open(self) -> ImageStore:
        if self._store is None:
            from proctor.sandbox.images import ImageStore

            self._store = ImageStore()
        return self._store

    def _stamp(self) -> object:
        """Changes whenever a reference of the store does."""
        try:
            info = (self._open().root / "refs.json").stat()
        except FileNotFoundError:
            return None
        return info.st_mtime_ns, info.st_ino

    def usage(self) -> Usage | None:
        """What the store holds; None while there is none. Blocking."""
        from proctor.sandbox.images import eviction

        store = self._open()
        return eviction.usage(store) if (store.root / "layers").is_dir() else None

    def make_room(self, wanted_bytes: int, home: Path) -> int:
        """Evict what was used longest ago until `wanted_bytes` are free on the disk of `home`, if that is the
        store's disk too. Returns the bytes that were freed. Blocking."""
        from proctor.sandbox.images import eviction

        store = self._open()
        if not store.root.is_dir() or store.root.stat().st_dev != home.stat().st_dev:
            return 0
        return eviction.evict(store, lambda usage: usage.free_bytes >= wanted_bytes).freed_bytes

    def lease(self, name: str, layers: tuple[Layer, ...], lock: Path) -> None:
        """Keep stored layers as long as somebody holds the file `lock`, whatever becomes of us."""
        from proctor.sandbox.images import eviction

        eviction.lease(self._open(), name, layers, lock)

    def release(self, name: str) -> None:
        """End a lease."""
        from proctor.sandbox.images import eviction

        eviction.release(self._open(), name)

    def close(self) -> None:
        """Let go of all layers."""
        for _, _, hold in self._known.values():
            hold.close()
        self._known.clear()
        if self._others is not None:
            self._others.close()
