"""Images: ordered stacks of read-only layers, stored once by digest; how they are made and brought in."""

from __future__ import annotations

from proctor.sandbox.images.store import Hold, ImageStore, Pruned, StoredImage, Workspace

__all__ = ["Hold", "ImageStore", "Pruned", "StoredImage", "Workspace"]
