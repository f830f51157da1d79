"""Images an Edge uses: resolved once, and held so that no prune can take their layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from proctor.sandbox.contract import Image, Layer

if TYPE_CHECKING:
    from proctor.sandbox.images import Hold, ImageStore


class ImageCache:
    """References resolved through the image store. A reference that is moved is seen at the next create."""

    def __init__(self, store: ImageStore | None) -> None:
        self._store = store
        self._known: dict[str, tuple[object, Image, Hold]] = {}
        self._others: Hold | None = None

    async def resolve(self, image: str | Image) -> Image:
        """The image for a reference; an Image is taken as it is. Raises ImageError."""
        if isinstance(image, Image):
            return image
        stamp = self._stamp()
        known = self._known.get(image)
        if known is not None and known[0] == stamp:
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

    def close(self) -> None:
        """Let go of all layers."""
        for _, _, hold in self._known.values():
            hold.close()
        self._known.clear()
        if self._others is not None:
            self._others.close()
