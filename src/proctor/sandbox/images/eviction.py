"""The layer cache between two watermarks: what was used longest ago goes, what is in use or cannot be had again stays.

Above the high mark, images are evicted, least recently used first, until the layers take no more than the low one. Only
images that are built again when they are needed go (the names that builds give by themselves, and images without a
name): what somebody imported under a name of their own is theirs to remove. A layer that a living process holds, or
that a sandbox without a process has a lease on, is never touched, nor is what was used a moment ago: between finding an
image and holding it lies a moment, too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from proctor.common import ConfigError, atomic_write
from proctor.sandbox.images.store import AUTOMATIC

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from proctor.sandbox.contract import Layer
    from proctor.sandbox.images.store import ImageStore

RECENT_S = 60.0
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True, slots=True)
class Usage:
    """What the store holds, and what its disk has left."""

    layers: int
    size_bytes: int
    free_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """What one pass removed, and what it would have but for being in use."""

    images: int
    layers: int
    freed_bytes: int
    in_use: int
    usage: Usage


class LeaseRecord(BaseModel):
    """Layers that a sandbox needs although no process of ours holds them; `lock` is held as long as it may."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = 1
    lock: str
    layers: tuple[str, ...]


def usage(store: ImageStore) -> Usage:
    """Count and size of all layers, by their records; no tree is walked."""
    sizes = store.layer_sizes()
    disk = os.statvfs(store.root)
    return Usage(len(sizes), sum(sizes.values()), disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)


def mark(text: str, disk_bytes: int, field: str) -> int:
    """Bytes of a watermark as people write it: `20G`, `500M`, or `60%` of the disk. Raises ConfigError."""
    body, number = text.strip().lower().removesuffix("b"), 0.0
    share = body.endswith("%")
    unit = body[-1:] if body[-1:] in _UNITS and body[-1:] else ""
    with suppress(ValueError):
        number = float(body[:-1] if share or unit else body)
    if not number > 0 or (share and number > 100):
        raise ConfigError(f"{text!r} is not a size", field=field, remedy="write 20G, 500M or 60%")
    return int(disk_bytes * number / 100) if share else int(number * _UNITS[unit])


def evict(store: ImageStore, enough: Callable[[Usage], bool], *, now: Callable[[], float] = time.time) -> Evicted:
    """Remove the least recently used until `enough` says so, or nothing more can go. Holds the store's lock."""
    with store.locked():
        held = usage(store)
        images = layers = freed = in_use = 0
        leased = leases(store)
        for candidate in _candidates(store, now() - RECENT_S):
            if enough(held):
                break
            gone, size = _remove_layers(store, candidate, leased)
            if candidate.image is not None and gone == candidate.layers:
                _remove_image(store, candidate)
                images += 1
            in_use += len(candidate.layers) - len(gone)
            layers, freed = layers + len(gone), freed + size
            held = Usage(held.layers - len(gone), held.size_bytes - size, held.free_bytes + size, held.disk_bytes)
    return Evicted(images, layers, freed, in_use, usage(store))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An image with the layers that would go with it, or a layer that no image has."""

    used_at: float
    image: str | None
    layers: tuple[str, ...]


def _candidates(store: ImageStore, before: float) -> list[_Candidate]:
    """Least recently used first. An image's layers are those of no image that stays or is used later."""
    users: dict[str, list[tuple[float, str, bool]]] = {}
    names: dict[str, list[str]] = {}
    for ref, entry in store.references().items():
        names.setdefault(entry, []).append(ref)
    images: list[tuple[float, str, tuple[str, ...], bool]] = []
    for digest, layers, used_at in store.manifests():
        kept = used_at > before or any(not ref.startswith(AUTOMATIC) for ref in names.get(digest, []))
        images.append((used_at, digest, layers, kept))
        for layer in layers:
            users.setdefault(layer, []).append((used_at, digest, kept))
    found = [
        _Candidate(used_at, digest, tuple(layer for layer in layers if max(users[layer], key=_last)[1] == digest))
        for used_at, digest, layers, kept in images
        if not kept
    ]
    for layer, made_at in store.layer_times().items():
        if layer not in users and made_at <= before:
            found.append(_Candidate(made_at, None, (layer,)))
    return sorted(found, key=lambda one: one.used_at)


def _last(user: tuple[float, str, bool]) -> tuple[bool, float, str]:
    """The user with whom a layer goes: one that stays, else the one that goes last."""
    used_at, digest, kept = user
    return kept, used_at, digest


def _remove_layers(store: ImageStore, candidate: _Candidate, leased: frozenset[str]) -> tuple[tuple[str, ...], int]:
    """Remove an image's own layers, if none of them is in use; an image with half its layers would be of no use."""
    if any(layer in leased or store.in_use(layer) for layer in candidate.layers):
        return (), 0
    sizes = store.layer_sizes()
    gone: list[str] = []
    for layer in candidate.layers:
        path = store.layer_path(layer)
        if (doomed := store.doom(path)) is not None:
            shutil.rmtree(doomed)
            path.with_name(f"{path.name}.json").unlink(missing_ok=True)
            gone.append(layer)
    return tuple(gone), sum(sizes.get(layer, 0) for layer in gone)


def _remove_image(store: ImageStore, candidate: _Candidate) -> None:
    assert candidate.image is not None
    store.forget_image(candidate.image)


# --- leases -----------------------------------------------------------------------------------------------------------


def lease(store: ImageStore, name: str, layers: Sequence[Layer], lock: Path) -> None:
    """Keep stored layers for as long as somebody holds a lock on the file `lock`, or until `release`."""
    digests = tuple(layer.digest for layer in layers if layer.digest is not None)
    (store.root / "leases").mkdir(parents=True, exist_ok=True)
    record = LeaseRecord(lock=str(lock), layers=digests)
    atomic_write(store.root / "leases" / f"{name}.json", record.model_dump_json().encode())


def release(store: ImageStore, name: str) -> None:
    """The layers are not needed any more."""
    with suppress(FileNotFoundError):
        (store.root / "leases" / f"{name}.json").unlink()


def leases(store: ImageStore) -> frozenset[str]:
    """Layers on which a lease holds; leases that do not any more are removed."""
    found: set[str] = set()
    for path in (store.root / "leases").glob("*.json"):
        try:
            record = LeaseRecord.model_validate_json(path.read_bytes())
        except (ValueError, FileNotFoundError):
            continue
        if _is_held(record.lock):
            found.update(record.layers)
        else:
            path.unlink(missing_ok=True)
    return frozenset(found)


def _is_held(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
