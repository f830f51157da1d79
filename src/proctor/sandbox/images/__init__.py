"""Images: ordered stacks of read-only layers, stored once by digest; how they are made and brought in."""

from __future__ import annotations

from proctor.sandbox.images.build import build_image, build_recipe, ensure_image
from proctor.sandbox.images.dockerfile import build_dockerfile
from proctor.sandbox.images.export import export_layout
from proctor.sandbox.images.oci import import_image
from proctor.sandbox.images.python import PythonBase, python_base
from proctor.sandbox.images.recipe import Recipe, load_recipe, parse_recipe
from proctor.sandbox.images.store import Hold, ImageStore, Pruned, StoredImage, Workspace
from proctor.sandbox.images.toolkit import PYTEST_HOME, pytest_toolkit
from proctor.sandbox.images.tools import Progress

__all__ = [
    "PYTEST_HOME",
    "Hold",
    "ImageStore",
    "Progress",
    "Pruned",
    "PythonBase",
    "Recipe",
    "StoredImage",
    "Workspace",
    "build_dockerfile",
    "build_image",
    "build_recipe",
    "ensure_image",
    "export_layout",
    "import_image",
    "load_recipe",
    "parse_recipe",
    "pytest_toolkit",
    "python_base",
]
