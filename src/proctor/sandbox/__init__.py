"""The exam room: real isolated sandboxes, useful by themselves.

    async with proctor.sandbox.create(SandboxSpec(image="host")) as box:
        result = await box.exec("echo hello")

`proctor.sandbox.sync` is the same for blocking code. What is heavy is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.sandbox.contract import (
    Backend,
    CommandInfo,
    DiffEntry,
    DiskDriver,
    EndReason,
    ExecResult,
    FileError,
    FileStat,
    GuestProtocolError,
    Image,
    ImageError,
    LaunchError,
    Layer,
    Lifecycle,
    Mount,
    OnOutput,
    Output,
    OutputLimit,
    Process,
    Receipt,
    Resources,
    Runtime,
    Sandbox,
    SandboxError,
    SandboxLost,
    SandboxSpec,
    Stats,
    Tier,
)

if TYPE_CHECKING:
    from proctor.sandbox import sync
    from proctor.sandbox._admission import Policy
    from proctor.sandbox.edge import Edge, create
    from proctor.sandbox.images import ImageStore
    from proctor.sandbox.pools import PoolSpec

__all__ = [
    "Backend",
    "CommandInfo",
    "DiffEntry",
    "DiskDriver",
    "Edge",
    "EndReason",
    "ExecResult",
    "FileError",
    "FileStat",
    "GuestProtocolError",
    "Image",
    "ImageError",
    "ImageStore",
    "LaunchError",
    "Layer",
    "Lifecycle",
    "Mount",
    "OnOutput",
    "Output",
    "OutputLimit",
    "Policy",
    "PoolSpec",
    "Process",
    "Receipt",
    "Resources",
    "Runtime",
    "Sandbox",
    "SandboxError",
    "SandboxLost",
    "SandboxSpec",
    "Stats",
    "Tier",
    "create",
    "sync",
]

_LAZY = {
    "Edge": ("proctor.sandbox.edge", "Edge"),
    "ImageStore": ("proctor.sandbox.images", "ImageStore"),
    "Policy": ("proctor.sandbox._admission", "Policy"),
    "PoolSpec": ("proctor.sandbox.pools", "PoolSpec"),
    "create": ("proctor.sandbox.edge", "create"),
    "sync": ("proctor.sandbox.sync", None),
}


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is first asked for (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    value = getattr(loaded, attribute) if attribute else loaded
    globals()[name] = value
    return value
