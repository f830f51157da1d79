"""OCI layouts and archives, `docker save` archives, root file systems, and registries (through skopeo), into the store.

Formats: OCI image-spec 1.0/1.1 (image-layout.md, manifest.md, config.md, layer.md) and Docker's image archive v1.2
(`manifest.json`). Every blob is checked against its digest, every layer against its diff id; what comes out of a
layer goes through `archive.extract`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import anyio

from proctor.common import atomic_write, digest_json
from proctor.sandbox.contract import Image, ImageError, Layer
from proctor.sandbox.images import archive
from proctor.sandbox.images.manifest import is_digest
from proctor.sandbox.images.tools import Progress, require_root, require_tool, run_tool, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proctor.sandbox.images.store import ImageStore, Workspace

_MAX_DOCUMENT = 16 << 20
_MAX_LAYERS = 400
_INDEXES = frozenset(
    {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
)
_MANIFESTS = frozenset(
    {"application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"}
)
_LAYERS = re.compile(
    r"application/vnd\.(oci\.image\.layer\.v1\.tar(\+(gzip|zstd))?|docker\.image\.rootfs\.diff\.tar(\.gzip|\.zstd)?)"
)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class _Blob:
    """One layer as found: its file, the digest its bytes must have (None: not named), and its diff id."""

    path: Path
    digest: str | None
    diff_id: str


async def import_image(
    source: str | Path, *, ref: str, store: ImageStore, progress: Progress | None = None, tag: str | None = None
) -> Image:
    """Bring an image in and let `ref` point at it; what it is, is told by its content.

    `source` is `docker://name`, an OCI layout directory, a root file system directory, or a file: an OCI or docker
    archive, or a tar of a root file system, plain or compressed. `tag` chooses among several images of a layout.
    """
    progress = progress or silent
    require_root("an image import")
    with store.workspace() as workspace:
        name = str(source)
        if name.startswith("docker://"):
            layout = await _fetch(name, workspace, progress)
            return await anyio.to_thread.run_sync(_import_layout, layout, None, ref, store, workspace, progress)
        job = _importer(Path(source))
        return await anyio.to_thread.run_sync(job, Path(source), tag, ref, store, workspace, progress)


def _importer(path: Path) -> Callable[[Path, str | None, str, ImageStore, Workspace, Progress], Image]:
    """What reads this file or directory."""
    if path.is_dir():
        return _import_layout if (path / "oci-layout").is_file() else _import_directory
    if path.is_file():
        return _import_file
    raise ImageError(f"{path} is neither a file nor a directory", field="source", remedy="registries: docker://NAME")


async def _fetch(source: str, workspace: Workspace, progress: Progress) -> Path:
    """Copy an image from a registry into a layout of ours."""
    tool = require_tool("skopeo")
    name = source.removeprefix("docker://")
    if not name or name.startswith("-"):
        raise ImageError(f"{source!r} names no image", field="source")
    layout = workspace.path / "pulled"
    # As in every client: a registry on this machine's loopback may speak plain HTTP, no other may.
    local = re.match(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?/", name) is not None
    command = [
        tool,
        "copy",
        "--retry-times",
        "1",
        "--override-os",
        "linux",
        f"--src-tls-verify={str(not local).lower()}",
    ]
    progress(0, 1, f"pulling {name}")
    try:
        await run_tool([*command, source, f"oci:{layout}:image"], what=f"pulling {name}", on_line=progress, total=1)
    except ImageError as error:
        raise ImageError(
            error.message,
            field="source",
            remedy="check the name and that its registry can be reached, or import a file that docker save wrote",
        ) from error
    return layout


# Root file systems.


def _import_directory(
    path: Path, tag: str | None, ref: str, store: ImageStore, workspace: Workspace, progress: Progress
) -> Image:
    """A root file system directory, read by tar and written by us, so it is checked like any archive."""
    progress(0, 1, f"importing {path}")
    tar = require_tool("tar")
    tree = workspace.directory("rootfs")
    command = [tar, "--directory", str(path), "--numeric-owner", "--one-file-system", "--sparse", "-cf", "-", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            with archive.decompressed_stream(process.stdout, str(path)) as stream:
                archive.extract(stream, tree, what=str(path), deletions=False)
            errors = process.stderr.read().decode("utf-8", "replace")
        except BaseException:
            process.kill()
            raise
    if process.returncode not in (0, 1):
        raise ImageError(f"cannot read {path}: {errors.strip()[-300:]}")
    return _store_rootfs(tree, ref, store, workspace)


def _import_file(
    path: Path, tag: str | None, ref: str, store: ImageStore, workspace: Workspace, progress: Progress
) -> Image:
    progress(0, 1, f"unpacking {path.name}")
    tree = workspace.directory("archive")
    with path.open("rb") as file, archive.decompressed(file, path.name) as stream:
        archive.extract(stream, tree, what=path.name, deletions=False)
    if (tree / "oci-layout").is_file() and (tree / "index.json").is_file():
        return _import_layout(tree, tag, ref, store, workspace, progress)
    if (tree / "manifest.json").is_file() and not (tree / "etc").exists():
        return _import_docker(tree, path.name, tag, ref, store, workspace, progress)
    return _store_rootfs(tree, ref, store, workspace)


def _store_rootfs(tree: Path, ref: str, store: ImageStore, workspace: Workspace) -> Image:
    if not any((tree / name).exists() or (tree / name).is_symlink() for name in ("bin", "usr", "etc", "lib")):
        raise ImageError("this is not a root file system: it has no bin, usr, etc or lib", field="source")
    layer = workspace.commit(tree, deletions=False)
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    return store.put(ref, [layer], env=env, labels={"source": "rootfs"})


# OCI layouts.


def _import_layout(
    layout: Path, tag: str | None, ref: str, store: ImageStore, workspace: Workspace, progress: Progress
) -> Image:
    manifest, name = find_manifest(layout, tag)
    config = read_document(layout, manifest.get("config"), "image config")
    blobs = layer_blobs(layout, manifest, config)
    layers = import_layers(blobs, store, workspace, progress)
    return put_config(config, layers, ref, store, {"source": "oci", "oci.manifest": name})


def find_manifest(layout: Path, tag: str | None) -> tuple[dict[str, Any], str]:
    """The image manifest of a layout and its digest: the only one, the one for this machine, or the one called
    `tag`."""
    marker = _json(layout / "oci-layout", "oci-layout")
    if not str(marker.get("imageLayoutVersion", "")).startswith("1."):
        raise ImageError("oci-layout has a version that is not known", field="oci-layout")
    index = _json(layout / "index.json", "index.json")
    for _ in range(3):
        entries = _list(index, "manifests")
        entries = [item for item in entries if item.get("mediaType") in _INDEXES | _MANIFESTS]
        if tag is not None:
            named = [i for i in entries if (i.get("annotations") or {}).get("org.opencontainers.image.ref.name") == tag]
            entries = named or entries
        chosen = _for_this_machine(entries)
        document = read_document(layout, chosen, "manifest")
        if chosen.get("mediaType") in _MANIFESTS:
            return document, str(chosen["digest"])
        index, tag = document, None
    raise ImageError("the layout's indexes are nested too deeply", field="index.json")


def _for_this_machine(entries: list[dict[str, Any]]) -> dict[str, Any]:
    machine = ARCHITECTURES.get(os.uname().machine, os.uname().machine)
    fitting = [
        item
        for item in entries
        if (platform := item.get("platform") or {}).get("os", "linux") == "linux"
        and platform.get("architecture", machine) == machine
    ]
    if len(fitting) != 1:
        raise ImageError(
            f"the layout holds {len(fitting)} images for linux/{machine}, so none can be chosen",
            field="index.json",
            remedy="name one by its tag" if fitting else None,
        )
    return fitting[0]


def read_document(layout: Path, descriptor: Any, what: str) -> dict[str, Any]:
    """A JSON blob by descriptor, checked against its digest."""
    path, digest = _blob(layout, descriptor, what)
    if path.stat().st_size > _MAX_DOCUMENT:
        raise ImageError(f"the {what} is larger than {_MAX_DOCUMENT} bytes")
    data = path.read_bytes()
    found = "sha256:" + hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ImageError(f"the {what} has digest {found}, not {digest}", remedy="fetch the image again")
    return _decode(data, what)


def _blob(layout: Path, descriptor: Any, what: str) -> tuple[Path, str]:
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not is_digest(digest):
        raise ImageError(f"the {what} is named by {digest!r}, which is not a sha256 digest")
    path = layout / "blobs" / "sha256" / digest[7:]
    if path.is_symlink() or not path.is_file():
        raise ImageError(f"the {what} {digest} is not in the layout")
    return path, digest


def layer_blobs(layout: Path, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> list[_Blob]:
    """The layers of a manifest with their diff ids."""
    descriptors = _list(manifest, "layers")
    diff_ids = _diff_ids(config, len(descriptors))
    blobs = []
    for number, (descriptor, diff_id) in enumerate(zip(descriptors, diff_ids, strict=True)):
        kind = str(descriptor.get("mediaType"))
        if not _LAYERS.fullmatch(kind):
            raise ImageError(f"layer {number} is of the kind {kind}, which is not a file system")
        path, digest = _blob(layout, descriptor, f"layer {number}")
        blobs.append(_Blob(path, digest, diff_id))
    return blobs


def _diff_ids(config: Mapping[str, Any], expected: int) -> list[str]:
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if (
        not isinstance(diff_ids, list)
        or len(diff_ids) != expected
        or not all(is_digest(str(item)) for item in diff_ids)
    ):
        raise ImageError("the image config does not name a diff id for each layer", field="rootfs.diff_ids")
    if not 1 <= expected <= _MAX_LAYERS:
        raise ImageError(f"the image has {expected} layers; 1 to {_MAX_LAYERS} can be used", field="layers")
    return [str(item) for item in diff_ids]


def import_layers(
    blobs: list[_Blob],
    store: ImageStore,
    workspace: Workspace,
    progress: Progress,
    *,
    first: bool = True,
    unwanted: tuple[str, ...] = (),
) -> list[Layer]:
    """Unpack layers, lowest first; one that was unpacked before is found by its diff id. Empty ones are left out.

    `first` says that nothing is below, so the lowest may not delete. `unwanted` names directories that are left out
    when they are empty: mount points of the build.
    """
    layers = []
    for number, blob in enumerate(blobs):
        progress(number, len(blobs), f"layer {number + 1} of {len(blobs)}")
        layer = _import_layer(blob, store, workspace, deletions=number > 0 or not first, unwanted=unwanted)
        if layer is not None:
            layers.append(layer)
    if first and not layers:
        raise ImageError("the image is empty")
    return layers


def _import_layer(
    blob: _Blob, store: ImageStore, workspace: Workspace, *, deletions: bool, unwanted: tuple[str, ...]
) -> Layer | None:
    key = digest_json(["oci layer 1", blob.diff_id, deletions, unwanted])
    cache = store.root / "cache" / key.removeprefix("sha256:")
    if cache.is_file():
        digest = cache.read_text().strip()
        if digest == "none":
            return None
        if store.layer_path(digest).is_dir():
            layer = store.layer(digest)
            workspace.hold([layer])
            return layer
    tree = workspace.directory("layer")
    what = f"layer {blob.diff_id[7:19]}"
    with blob.path.open("rb") as file:
        packed = _Hashing(file)
        with archive.decompressed_stream(cast("IO[bytes]", packed), what) as stream:
            plain = _Hashing(stream)
            facts = archive.extract(plain, tree, what=what, deletions=deletions)
            plain.drain()
        packed.drain()
    for found, wanted in ((packed.digest(), blob.digest), (plain.digest(), blob.diff_id)):
        if wanted is not None and found != wanted:
            raise ImageError(f"{what} has digest {found}, not {wanted}", remedy="fetch the image again")
    for name in unwanted:
        path = tree / name[1:]
        while path != tree and path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
            path = path.parent
    made = workspace.commit(tree, deletions=deletions) if facts.entries and any(tree.iterdir()) else None
    atomic_write(cache, (made.digest if made and made.digest else "none").encode() + b"\n")
    return made


class _Hashing:
    """A stream that digests what passes through."""

    def __init__(self, stream: archive.Readable) -> None:
        self._stream = stream
        self._hasher = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self._hasher.update(data)
        return data

    def drain(self) -> None:
        """Read what is left (padding after the end of the tar)."""
        while self.read(1 << 20):
            pass

    def digest(self) -> str:
        return "sha256:" + self._hasher.hexdigest()


def put_config(
    config: Mapping[str, Any], layers: list[Layer], ref: str | None, store: ImageStore, labels: Mapping[str, str]
) -> Image:
    """Store an image with the defaults that an OCI config names (image-spec, config.md)."""
    inner = config.get("config") or {}
    if not isinstance(inner, dict):
        raise ImageError("the image config is not a table", field="config")
    return store.put(
        ref,
        layers,
        env=config_env(inner),
        workdir=inner.get("WorkingDir") or "/",
        user=inner.get("User") or "root",
        labels=labels,
    )


def config_env(inner: Mapping[str, Any]) -> dict[str, str]:
    """`Env` of an OCI config as a mapping."""
    pairs = [str(item).partition("=") for item in inner.get("Env") or []]
    return {name: value for name, equals, value in pairs if name and equals}


# Docker archives.


def _import_docker(
    tree: Path, what: str, tag: str | None, ref: str, store: ImageStore, workspace: Workspace, progress: Progress
) -> Image:
    data = _small_file(tree, "manifest.json")
    try:
        entries = json.loads(data)
    except ValueError as error:
        raise ImageError(f"{what}: manifest.json is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(item, dict) for item in entries):
        raise ImageError(f"{what}: manifest.json is not a list of images")
    if tag is not None:
        entries = [item for item in entries if tag in (item.get("RepoTags") or [])]
    if len(entries) != 1:
        raise ImageError(f"{what} holds {len(entries)} images", field="source", remedy="name one by its tag")
    config = _decode(_small_file(tree, str(entries[0].get("Config"))), "image config")
    names = entries[0].get("Layers")
    if not isinstance(names, list):
        raise ImageError(f"{what}: manifest.json names no layers")
    diff_ids = _diff_ids(config, len(names))
    blobs = [_Blob(_member(tree, str(name)), None, diff_id) for name, diff_id in zip(names, diff_ids, strict=True)]
    layers = import_layers(blobs, store, workspace, progress)
    return put_config(config, layers, ref, store, {"source": "docker-archive"})


def _member(tree: Path, name: str) -> Path:
    """A file of an unpacked archive by the name another file gives; links are followed inside the tree only."""
    path = Path(os.path.realpath(tree / name))
    if not path.is_relative_to(os.path.realpath(tree)) or not path.is_file():
        raise ImageError(f"the archive names {name!r}, which is not a file in it")
    return path


def _small_file(tree: Path, name: str) -> bytes:
    path = _member(tree, name)
    if path.stat().st_size > _MAX_DOCUMENT:
        raise ImageError(f"{name} is larger than {_MAX_DOCUMENT} bytes")
    return path.read_bytes()


def _json(path: Path, what: str) -> dict[str, Any]:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_DOCUMENT:
        raise ImageError(f"{what} is missing or not a plain file")
    return _decode(path.read_bytes(), what)


def _decode(data: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"the {what} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ImageError(f"the {what} is not a JSON object")
    return document


def _list(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = document.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ImageError(f"{key} is not a list of objects", field=key)
    return value
