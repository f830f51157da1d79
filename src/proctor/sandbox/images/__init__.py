"""Images: ordered stacks of read-only layers, stored once by digest; how they are made and brought in.

Each name is imported on first use: an Edge needs the store alone, not the builders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_LAZY = {
    "build_image": "proctor.sandbox.images.build",
    "build_recipe": "proctor.sandbox.images.build",
    "ensure_image": "proctor.sandbox.images.build",
    "build_dockerfile": "proctor.sandbox.images.dockerfile",
    "export_layout": "proctor.sandbox.images.export",
    "import_image": "proctor.sandbox.images.oci",
    "PythonBase": "proctor.sandbox.images.python",
    "python_base": "proctor.sandbox.images.python",
    "Recipe": "proctor.sandbox.images.recipe",
    "load_recipe": "proctor.sandbox.images.recipe",
    "parse_recipe": "proctor.sandbox.images.recipe",
    "Hold": "proctor.sandbox.images.store",
    "ImageStore": "proctor.sandbox.images.store",
    "Pruned": "proctor.sandbox.images.store",
    "StoredImage": "proctor.sandbox.images.store",
    "Workspace": "proctor.sandbox.images.store",
    "PYTEST_HOME": "proctor.sandbox.images.toolkit",
    "pytest_toolkit": "proctor.sandbox.images.toolkit",
    "Progress": "proctor.sandbox.images.tools",
}


def __getattr__(name: str) -> Any:
    """Import what a name stands for when it is first asked for (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value
