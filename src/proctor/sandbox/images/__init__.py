"""Images: ordered stacks of read-only layers, stored once by digest; how they are made and brought in."""

from __future__ import annotations

from proctor.sandbox.images.build import build_image, build_recipe, ensure_image
from proctor.sandbox.images.python import PythonBase, python_base
from proctor.sandbox.images.recipe import Recipe, load_recipe, parse_recipe
from proctor.sandbox.images.store import Hold, ImageStore, Pruned, StoredImage, Workspace
from proctor.sandbox.images.tools import Progress

__all__ = [
    "Hold",
    "ImageStore",
    "Progress",
    "Pruned",
    "PythonBase",
    "Recipe",
    "StoredImage",
    "Workspace",
    "build_image",
    "build_recipe",
    "ensure_image",
    "load_recipe",
    "parse_recipe",
    "python_base",
]
