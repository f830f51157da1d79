"""The image store: layers stored once by digest, images that list them, references that name images.

    <root>/layers/<hex>/       a layer's tree, with the ids it has inside (0 is 0); `layers` is 0700 root, because
                               set-id files of images live there
    <root>/layers/<hex>.json   its size
    <root>/images/<hex>.json   an image manifest; the digest of these bytes is the image's digest
    <root>/refs.json           references
    <root>/tmp/<id>/           a workspace; locked while it is used
    <root>/lock                held for every change of references and for pruning

Whatever is visible is whole: trees and files are written in `tmp` and renamed. A layer in use is held by a shared
flock on its directory, which the kernel drops when the holder dies; pruning needs the exclusive one.
"""

from __future__ import annotations

import ctypes
import datetime
import errno
import fcntl
import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from proctor.common import atomic_write, new_id, state_dir
from proctor.sandbox.contract import Image, ImageError, Layer, Mount
from proctor.sandbox.images import tree
from proctor.sandbox.images.manifest import (
    ImageManifest,
    LayerRecord,
    MountRecord,
    RefRecord,
    RefTable,
    check_ref,
    is_digest,
    parse_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

EMPTY = "{empty}"
_SHORTEST_PREFIX = 12
AUTOMATIC = ("recipe:", "dockerfile:", "task:", "toolkit:", "pulled:")


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One line of `ImageStore.list`: `shared_bytes` counts what another image also uses."""

    ref: str | None
    digest: str
    layers: int
    size_bytes: int
    shared_bytes: int
    created_at: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `ImageStore.prune` removed, and what it left because somebody uses it."""

    images: int
    layers: int
    freed_bytes: int
    in_use: int


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _sync_file_system(root: Path) -> None:
    """Flush the file system that holds `root`: a renamed tree must not be found empty after a power cut."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(handle) != 0:
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(handle)


class Hold:
    """Keeps layers from being pruned until closed (or until this process ends)."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}

    def take(self, path: Path) -> None:
        """Hold one layer's directory; raises ImageError if it was pruned in the meantime."""
        if path.name in self._handles:
            return
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ImageError(
                f"layer {path.name[:12]} is gone from the store", remedy="build the image again"
            ) from error
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                self._handles[path.name] = handle
                return
        os.close(handle)
        raise ImageError(f"layer {path.name[:12]} was pruned just now", remedy="build the image again")

    def close(self) -> None:
        """Let go."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Workspace:
    """A private directory inside the store, on the same file system as the layers; what is committed from it is held
    until it closes, so that a prune in between cannot take a layer that no image names yet."""

    def __init__(self, store: ImageStore, path: Path, hold: Hold) -> None:
        self._store = store
        self._hold = hold
        self.path = path

    def directory(self, name: str, mode: int = 0o755) -> Path:
        """A new empty directory."""
        path = self.path / f"{name}-{new_id()}"
        path.mkdir(mode=0o700)
        path.chmod(mode)
        return path

    def commit(self, root: Path, *, id_base: int = 0, deletions: bool = True, strip_setid: bool = False) -> Layer:
        """Turn a tree of this workspace into a stored layer (see `tree.normalise`); the tree is consumed."""
        tree.normalise(root, id_base=id_base, deletions=deletions, strip_setid=strip_setid)
        facts = tree.scan(root)
        target = self._store.layer_path(facts.digest)
        record = LayerRecord(digest=facts.digest, size_bytes=facts.size_bytes, entries=facts.entries)
        if not target.is_dir():
            _sync_file_system(root)
        with self._store.locked():
            if not target.is_dir():
                atomic_write(target.with_name(f"{target.name}.json"), record.model_dump_json().encode())
                os.rename(root, target)
            self._hold.take(target)
        if root.is_dir():
            shutil.rmtree(root)
        return Layer(path=target, digest=facts.digest, size_bytes=facts.size_bytes)

    def hold(self, layers: Sequence[Layer]) -> None:
        """Keep layers that are already stored."""
        for layer in layers:
            self._hold.take(layer.path)


class ImageStore:
    """Images of one machine.

    `root` defaults to `$PROCTOR_IMAGES`, else `images` in Proctor's state directory. Several processes may use
    one store at a time.
    """

    def __init__(self, root: Path | None = None) -> None:
        if root is None:
            configured = os.environ.get("PROCTOR_IMAGES")
            root = Path(configured) if configured else state_dir() / "images"
        self.root = root.absolute()

    def _prepare(self) -> None:
        for name, mode in (("layers", 0o700), ("images", 0o755), ("tmp", 0o700), ("empty", 0o755)):
            path = self.root / name
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                path.chmod(mode)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock: for the short moments in which names change."""
        self._prepare()
        with (self.root / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def workspace(self) -> Iterator[Workspace]:
        """A private directory to build in; removed at the end, or after a crash when the next one is opened.

        A full disk, wherever in the block it is met, becomes an ImageError; what was begun is removed.
        """
        with ExitStack() as stack:
            stack.enter_context(self._full_disk_named())
            with self.locked():
                doomed = self._doom_workspaces()
                path = self.root / "tmp" / new_id()
                path.mkdir(mode=0o700)
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_SH)
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            for left in doomed:
                shutil.rmtree(left, ignore_errors=True)
            yield Workspace(self, path, stack.enter_context(Hold()))

    @contextmanager
    def _full_disk_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ImageError(
                f"the disk that holds {self.root} is full; nothing was changed", remedy="proctor image prune"
            ) from error

    def layer_path(self, digest: str) -> Path:
        """Where the layer of that digest is, or would be."""
        return self.root / "layers" / _hex(digest)

    def layer(self, digest: str) -> Layer:
        """A stored layer by digest; ImageError if it is not here."""
        path = self.layer_path(digest)
        if not is_digest(digest) or not path.is_dir():
            raise ImageError(f"layer {digest} is not in the store {self.root}", remedy="build the image again")
        data = path.with_name(f"{path.name}.json").read_bytes()
        record = parse_record(LayerRecord, data, f"layers/{path.name}.json")
        return Layer(path=path, digest=digest, size_bytes=record.size_bytes)

    def verify_layer(self, digest: str) -> None:
        """Walk a layer and compare its content with its name; ImageError if they differ."""
        found = tree.scan(self.layer(digest).path).digest
        if found != digest:
            raise ImageError(f"layer {digest} has the content of {found}", remedy="remove it and build the image again")

    def hold(self, image: Image) -> Hold:
        """Keep every layer of `image` from being pruned until the result is closed."""
        hold = Hold()
        try:
            for layer in image.layers:
                if layer.digest is not None:
                    hold.take(layer.path)
        except BaseException:
            hold.close()
            raise
        return hold

    # Images and references.

    def put(
        self,
        ref: str | None,
        layers: Sequence[Layer],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str = "/",
        user: str = "root",
        mounts: Sequence[MountRecord] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Image:
        """Store an image of stored layers and, unless `ref` is None, let `ref` point at it."""
        digests = []
        for layer in layers:
            if layer.digest is None:
                raise ImageError("an image holds stored layers only", remedy="commit the layer first")
            digests.append(layer.digest)
        manifest = ImageManifest(
            layers=tuple(digests),
            env=dict(env or {}),
            workdir=workdir,
            user=user,
            mounts=tuple(mounts),
            labels=dict(labels or {}),
        )
        digest = manifest.digest()
        with self.locked():
            path = self.root / "images" / f"{_hex(digest)}.json"
            if not path.is_file():
                atomic_write(path, manifest.data())
            if ref is not None:
                self._point(ref, digest)
        return self._image(ref or digest, digest, manifest)

    def tag(self, ref: str, image: str) -> None:
        """Let `ref` point at what `image` (a reference or digest) names."""
        digest = self.resolve(image).digest
        with self.locked():
            self._point(ref, digest)

    def _point(self, ref: str, digest: str) -> None:
        table = self._refs()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry = RefRecord(digest=digest, created_at=now)
        self._write_refs(RefTable(refs={**table.refs, check_ref(ref): entry}))

    def _refs(self) -> RefTable:
        try:
            data = (self.root / "refs.json").read_bytes()
        except FileNotFoundError:
            return RefTable()
        return parse_record(RefTable, data, "refs.json of the image store")

    def _write_refs(self, table: RefTable) -> None:
        atomic_write(self.root / "refs.json", table.model_dump_json(indent=1).encode() + b"\n")

    def _manifest(self, digest: str) -> ImageManifest:
        path = self.root / "images" / f"{_hex(digest)}.json"
        manifest = parse_record(ImageManifest, path.read_bytes(), f"images/{path.name}")
        if manifest.digest() != digest:
            raise ImageError(f"images/{path.name} is damaged: its content is {manifest.digest()}")
        return manifest

    def _image(self, ref: str, digest: str, manifest: ImageManifest) -> Image:
        mounts = [
            Mount(self.root / "empty", mount.target, empty=True)
            if mount.source == EMPTY
            else Mount(Path(mount.source), mount.target)
            for mount in manifest.mounts
        ]
        return Image(
            ref=ref,
            digest=digest,
            layers=tuple(self.layer(item) for item in manifest.layers),
            env=manifest.env,
            workdir=manifest.workdir,
            user=manifest.user,
            mounts=tuple(mounts),
            labels=manifest.labels,
        )

    def find_digest(self, ref: str) -> str | None:
        """The digest that a reference, a digest or a unique prefix of one (12 digits or more) names, or None."""
        if is_digest(ref):
            return ref if (self.root / "images" / f"{_hex(ref)}.json").is_file() else None
        if ref.startswith("sha256:") and len(_hex(ref)) >= _SHORTEST_PREFIX and _hex(ref).isalnum():
            found = sorted((self.root / "images").glob(f"{_hex(ref)}*.json"))
            return f"sha256:{found[0].stem}" if len(found) == 1 else None
        entry = self._refs().refs.get(check_ref(ref))
        return entry.digest if entry else None

    def resolve(self, ref: str) -> Image:
        """The image that a reference or digest names, with every layer present; ImageError otherwise.

        `host` is made on the spot when the machine has changed since: it needs no download.
        """
        if ref == "host":
            from proctor.sandbox.images.host import host_image

            return host_image(self)
        digest = self.find_digest(ref)
        if digest is None:
            raise ImageError(f"there is no image {ref} in {self.root}", field="image", remedy=_remedy(ref))
        self.touch(digest)
        return self._image(ref, digest, self._manifest(digest))

    def touch(self, digest: str) -> None:
        """The image is used now: what is used longest ago is evicted first. Its manifest's time says so."""
        with suppress(OSError):
            os.utime(self.root / "images" / f"{_hex(digest)}.json")

    def list(self) -> list[StoredImage]:
        """Every reference, and every image without one, with sizes."""
        table = self._refs().refs
        digests = [f"sha256:{path.stem}" for path in sorted((self.root / "images").glob("*.json"))]
        manifests = {digest: self._manifest(digest) for digest in digests}
        users: dict[str, set[str]] = {}
        for digest, manifest in manifests.items():
            for layer in manifest.layers:
                users.setdefault(layer, set()).add(digest)
        sizes = {layer: self.layer(layer).size_bytes or 0 for layer in users}
        named = {entry.digest for entry in table.values()}
        rows: list[tuple[str | None, str, str]]
        rows = [(ref, entry.digest, entry.created_at) for ref, entry in sorted(table.items())]
        rows += [(None, digest, "") for digest in digests if digest not in named]
        return [
            StoredImage(
                ref=ref,
                digest=digest,
                layers=len(manifests[digest].layers),
                size_bytes=sum(sizes[layer] for layer in manifests[digest].layers),
                shared_bytes=sum(sizes[layer] for layer in manifests[digest].layers if len(users[layer]) > 1),
                created_at=created,
            )
            for ref, digest, created in rows
            if digest in manifests
        ]

    def remove(self, ref: str) -> None:
        """Drop a reference (its content goes with the next prune), or an image by digest and all its references."""
        with self.locked():
            table = self._refs()
            digest = self.find_digest(ref)
            if digest is None:
                raise ImageError(f"there is no image {ref} in {self.root}", field="image", remedy="proctor image ls")
            if ref in table.refs:
                kept = {name: entry for name, entry in table.refs.items() if name != ref}
            else:
                kept = {name: entry for name, entry in table.refs.items() if entry.digest != digest}
                (self.root / "images" / f"{_hex(digest)}.json").unlink()
            self._write_refs(RefTable(refs=kept))

    def prune(self, *, automatic: bool = False) -> Pruned:
        """Remove images that no reference names, layers that no image uses, and workspaces of dead processes.

        A layer or workspace that a living process holds stays. With `automatic`, references that builds gave by
        themselves are dropped first: what they name is built again when it is needed.
        """
        from proctor.sandbox.images.eviction import leases

        with self.locked():
            if automatic:
                table = self._refs().refs
                kept = {ref: entry for ref, entry in table.items() if not ref.startswith(AUTOMATIC)}
                self._write_refs(RefTable(refs=kept))
            named = {_hex(entry.digest) for entry in self._refs().refs.values()}
            images = [path for path in (self.root / "images").glob("*.json") if path.stem not in named]
            for path in images:
                path.unlink()
            used: set[str] = set()
            for path in (self.root / "images").glob("*.json"):
                used.update(_hex(layer) for layer in self._manifest(f"sha256:{path.stem}").layers)
            layers = freed = in_use = 0
            leased = leases(self)
            for path in (self.root / "layers").iterdir():
                if not path.is_dir() or path.name in used:
                    continue
                if f"sha256:{path.name}" in leased:
                    in_use += 1
                    continue
                size = self.layer(f"sha256:{path.name}").size_bytes or 0
                if doomed := self.doom(path):
                    shutil.rmtree(doomed)
                    path.with_name(f"{path.name}.json").unlink(missing_ok=True)
                    layers, freed = layers + 1, freed + size
                else:
                    in_use += 1
            for path in self._doom_workspaces():
                shutil.rmtree(path)
            self._sweep()
        return Pruned(len(images), layers, freed, in_use)

    # What eviction looks at; the caller holds the lock.

    def references(self) -> dict[str, str]:
        """Every reference and the digest it names."""
        return {ref: entry.digest for ref, entry in self._refs().refs.items()}

    def manifests(self) -> tuple[tuple[str, tuple[str, ...], float], ...]:
        """Every image's digest, layers and time of last use."""
        found = []
        for path in (self.root / "images").glob("*.json"):
            digest = f"sha256:{path.stem}"
            found.append((digest, self._manifest(digest).layers, path.stat().st_mtime))
        return tuple(found)

    def layer_sizes(self) -> dict[str, int]:
        """Every stored layer's size by its record."""
        found = {}
        for path in (self.root / "layers").glob("*.json"):
            if path.with_suffix("").is_dir():
                record = parse_record(LayerRecord, path.read_bytes(), f"layers/{path.name}")
                found[record.digest] = record.size_bytes
        return found

    def layer_times(self) -> dict[str, float]:
        """When each layer was stored."""
        return {
            f"sha256:{path.name}": path.with_name(f"{path.name}.json").stat().st_mtime
            for path in (self.root / "layers").iterdir()
            if path.is_dir() and path.with_name(f"{path.name}.json").is_file()
        }

    def in_use(self, digest: str) -> bool:
        """Whether a living process holds the layer."""
        try:
            handle = os.open(self.layer_path(digest), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def forget_image(self, digest: str) -> None:
        """Drop an image and every name of it."""
        kept = {ref: entry for ref, entry in self._refs().refs.items() if entry.digest != digest}
        if len(kept) != len(self._refs().refs):
            self._write_refs(RefTable(refs=kept))
        (self.root / "images" / f"{_hex(digest)}.json").unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what a crash left beside layers and images, and memories of layers and images that are gone.

        Everything in these directories is written under the store's lock, which the caller holds.
        """
        for path in [*(self.root / "layers").iterdir(), *(self.root / "images").iterdir(), *self.root.glob(".*")]:
            orphan = path.parent.name == "layers" and path.suffix == ".json" and not path.with_suffix("").is_dir()
            if path.is_file() and (path.name.startswith(".") or orphan):
                path.unlink()
        for path in (self.root / "cache").glob("*"):
            digest = path.read_text("utf-8", "replace").strip() if path.is_file() else ""
            image = self.root / "images" / f"{_hex(digest)}.json"
            if is_digest(digest) and not self.layer_path(digest).is_dir() and not image.is_file():
                path.unlink(missing_ok=True)

    def _doom_workspaces(self) -> tuple[Path, ...]:
        """Workspaces whose process is gone, renamed; the caller holds the lock and removes them."""
        return tuple(doomed for path in (self.root / "tmp").iterdir() if (doomed := self.doom(path)))

    def doom(self, path: Path) -> Path | None:
        """Rename a directory that nobody holds, so that nobody can begin to; None if somebody does."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doomed = self.root / "tmp" / new_id("doomed")
            os.rename(path, doomed)
        except BlockingIOError:
            return None
        finally:
            os.close(handle)
        return doomed


def _remedy(ref: str) -> str:
    return "proctor image ls" if ref.startswith("sha256:") else f"proctor image build {ref}"
