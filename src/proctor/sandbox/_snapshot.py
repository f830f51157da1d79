"""The numbers of an Edge at one moment: its own counters, and what the kernel and the image store say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import anyio

from proctor.sandbox._admission import Machine

if TYPE_CHECKING:
    from proctor.sandbox.box import Box
    from proctor.sandbox.edge import Edge


async def take(edge: Edge) -> dict[str, Any]:
    """Everything that `metrics` shows. Reads the kernel and the image store in a thread."""
    boxes = [box for box in edge._boxes.values() if box.ended is None]
    lives = [box._live for box in boxes if box._live is not None]
    known = frozenset({live.slot for live in lives} | edge._burial.slots)
    held = edge._ledger.held
    return {
        "edge": edge.id,
        **edge.meters.as_json(),
        "launcher_starts": edge._runtimes.native.launcher_starts,
        "alive": len(boxes),
        "durable": sum(box.spec.lifecycle.durable for box in boxes),
        "paused": sum(box.paused for box in boxes),
        "ending": len(edge._boxes) - len(boxes),
        "running_commands": sum(_running(box) for box in boxes),
        "memory_promised_bytes": held.memory_mb << 20,
        "cpus_promised": held.cpus,
        "pids_promised": held.pids,
        "disk_promised_bytes": held.disk_mb << 20,
        "pools": [pool.as_json() for pool in edge._pools.all],
        "frozen_layers": len(edge._frozen),
        "frozen_bytes": edge._frozen.memory_mb() << 20,
        **await anyio.to_thread.run_sync(_read, edge, known),
    }


def _running(box: Box) -> int:
    """Commands of a durable sandbox run with nobody waiting, too."""
    return box._running if box._commands is None else len(box._commands.running())


def _read(edge: Edge, known: frozenset[str]) -> dict[str, Any]:
    machine = Machine.read(edge.home)
    ready, wanted = edge._runtimes.native.pool(known)
    facts: dict[str, Any] = {
        "pool_ready": ready,
        "pool_wanted": wanted,
        "memory_available_bytes": machine.memory_available_mb << 20,
        "disk_free_bytes": machine.disk_free_mb << 20,
        "open_files": len(os.listdir("/proc/self/fd")),
    }
    usage = edge._images.usage()
    if usage is not None:
        facts |= {
            "layer_cache_layers": usage.layers,
            "layer_cache_bytes": usage.size_bytes,
            "layer_cache_free_bytes": usage.free_bytes,
        }
    return facts
