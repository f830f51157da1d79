"""Docker images made of our layers: the same stack, each layer as a tar with OCI whiteouts, loaded once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from proctor.sandbox._tar import write_plain_layer
from proctor.sandbox.runtimes.docker.engine import Engine, file_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

GUEST: Final = "/.proctor-init"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class _Known:
    """A stack that the engine has: its name there, and the digests of its layers."""

    reference: str
    diff_ids: tuple[str, ...]


class StackImages:
    """Which stacks the engine has. `repository` is where this home's images are named."""

    def __init__(self, engine: Engine, repository: str, room: Path) -> None:
        self._engine = engine
        self._repository = repository
        self._room = room
        self._known: dict[tuple[str, ...], _Known] = {}
        self._frozen: set[str] = set()
        self._passing: list[str] = []
        self._making = anyio.Lock()

    async def get(self, paths: Sequence[Path | int]) -> str:
        """The image of these layers, lowest first: loaded if it is not there yet."""
        keys = tuple(_key(path) for path in paths)
        async with self._making:
            if keys not in self._known:
                self._known[keys] = await self._make(paths, keys)
            return self._known[keys].reference

    async def commit(self, paths: Sequence[Path | int], upper: Path, container: str, name: str) -> None:
        """The engine's own image of a stopped container whose changes are `upper`, on top of `paths`."""
        reference = f"{self._repository}:{name.lower()}"
        query = {"container": container, "repo": self._repository, "tag": name.lower(), "pause": "0"}
        await self._engine.call("POST", "/commit", query=query, body={})
        self._frozen.add(_key(upper))
        keys = (*(_key(path) for path in paths), _key(upper))
        self._known[keys] = _Known(reference, await self._digests(reference))

    async def forget(self, name: str) -> None:
        """Remove the image that `commit` made."""
        reference = f"{self._repository}:{name.lower()}"
        self._known = {keys: known for keys, known in self._known.items() if known.reference != reference}
        await self._engine.call("DELETE", f"/images/{reference}", fine=(404, 409))

    async def close(self) -> None:
        """Remove what was loaded for stacks that end with this Edge; the others stay for the next."""
        for reference in self._passing:
            await self._engine.call("DELETE", f"/images/{reference}", fine=(404, 409))

    async def _digests(self, reference: str) -> tuple[str, ...]:
        found = await self._engine.call("GET", f"/images/{reference}/json")
        return tuple(found["RootFS"]["Layers"])

    async def _make(self, paths: Sequence[Path | int], keys: tuple[str, ...]) -> _Known:
        """Load what is not there, above the longest part of the stack that is."""
        below = max((n for n in range(len(keys)) if keys[:n] in self._known), default=0)
        had = self._known[keys[:below]].diff_ids if below else ()
        stable = not any(key.startswith("inode ") or key in self._frozen for key in keys)
        name = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:32]
        reference = f"{self._repository}:{name}"
        if stable and await self._engine.call("GET", f"/images/{reference}/json", fine=(404,)) is not None:
            return _Known(reference, await self._digests(reference))
        with tempfile.TemporaryDirectory(dir=self._room) as folder:
            archive = Path(folder, "image.tar")
            digests = await anyio.to_thread.run_sync(_write, archive, list(paths[below:]), had, reference)
            await self._engine.call("POST", "/images/load", query={"quiet": "1"}, content=file_chunks(archive))
        if not stable:
            self._passing.append(reference)
        return _Known(reference, digests)


def _key(path: Path | int) -> str:
    """What tells one layer from another: stored ones have a path by digest, frozen ones a directory of their own."""
    if isinstance(path, int):
        info = os.fstat(path)
        return f"inode {info.st_dev}:{info.st_ino}"
    return str(path)


def _write(archive: Path, paths: list[Path | int], had: tuple[str, ...], reference: str) -> tuple[str, ...]:
    """A `docker save` archive of a whole stack, of which only the layers that the engine lacks are in it. Blocking."""
    digests = list(had)
    with tarfile.open(archive, "w") as tar:
        layers = [f"{number}.tar" for number in range(len(digests))]
        if not had:
            _add_layer(tar, layers, digests, _base_layer(archive.with_name("layer")))
        for path in paths:
            _add_layer(tar, layers, digests, _layer(path, archive.with_name("layer")))
        config: dict[str, Any] = {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
        _add_bytes(tar, "config.json", json.dumps(config).encode())
        manifest = [{"Config": "config.json", "RepoTags": [reference], "Layers": layers}]
        _add_bytes(tar, "manifest.json", json.dumps(manifest).encode())
    return tuple(digests)


def _layer(path: Path | int, target: Path) -> Path:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY) if isinstance(path, Path) else os.dup(path)
    try:
        write_plain_layer(descriptor, target)
    finally:
        os.close(descriptor)
    return target


def _base_layer(target: Path) -> Path:
    """Below everything: the place that the guest is mounted on, so that it is no change of the sandbox."""
    with tarfile.open(target, "w") as tar:
        _add_bytes(tar, GUEST.lstrip("/"), b"")
    return target


def _add_layer(tar: tarfile.TarFile, layers: list[str], digests: list[str], source: Path) -> None:
    with source.open("rb") as file:
        digests.append("sha256:" + hashlib.file_digest(file, "sha256").hexdigest())
    layers.append(f"{len(layers)}.tar")
    tar.add(source, arcname=layers[-1])
    source.unlink()


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
