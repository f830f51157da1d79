"""A stored image as an OCI layout (image-spec, image-layout.md): what buildah is given, and other tools can read."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from typing import IO, TYPE_CHECKING, Any

from proctor.sandbox.contract import ImageError
from proctor.sandbox.images.oci import ARCHITECTURES
from proctor.sandbox.images.tree import OPAQUE, is_whiteout, walk

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from proctor.sandbox.contract import Image


def export_layout(image: Image, target: Path, *, env: Mapping[str, str] | None = None, tag: str = "image") -> list[str]:
    """Write an image as an OCI layout of uncompressed layers into the new directory `target`; returns the diff ids.

    `env` replaces the image's environment.
    """
    if image.mounts:
        raise ImageError(f"{image.ref} shows this machine itself; it cannot be exported", field="image")
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    descriptors = []
    for layer in image.layers:
        part = blobs / "part"
        with part.open("wb") as file:
            _write_layer(layer.path, file)
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = part.stat().st_size
        os.replace(part, blobs / digest)
        descriptors.append(_descriptor("application/vnd.oci.image.layer.v1.tar", digest, size))
    diff_ids = [str(item["digest"]) for item in descriptors]
    variables = image.env if env is None else env
    config = {
        "architecture": ARCHITECTURES.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Env": [f"{name}={value}" for name, value in variables.items()],
            "WorkingDir": image.workdir,
            "User": "" if image.user == "root" else image.user,
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "proctor"} for _ in diff_ids],
    }
    config_entry = _put_json(blobs, "application/vnd.oci.image.config.v1+json", config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config_entry,
        "layers": descriptors,
    }
    entry = _put_json(blobs, "application/vnd.oci.image.manifest.v1+json", manifest)
    entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
    (target / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return diff_ids


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _put_json(blobs: Path, kind: str, document: Mapping[str, Any]) -> dict[str, Any]:
    data = json.dumps(document).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return _descriptor(kind, digest, len(data))


def _write_layer(root: Path, file: IO[bytes]) -> None:
    """A stored layer as a tar with OCI whiteouts."""
    links: dict[int, str] = {}
    base = os.fsencode(root)
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path, info in walk(base):
            name = os.fsdecode(path[len(base) + 1 :])
            folder, _, leaf = name.rpartition("/")
            if is_whiteout(info):
                tar.addfile(tarfile.TarInfo(f"{folder}/.wh.{leaf}".lstrip("/")))
                continue
            member = tar.gettarinfo(os.fsdecode(path), arcname=name)
            member.uname = member.gname = ""
            member.mtime = int(info.st_mtime)
            if member.isreg() or member.islnk():
                # tarfile keeps its own table of hard links by name on disk, which would leak the store's paths.
                member.type, member.linkname, member.size = tarfile.REGTYPE, "", info.st_size
                if info.st_nlink > 1 and info.st_ino in links:
                    member.type, member.linkname, member.size = tarfile.LNKTYPE, links[info.st_ino], 0
                    tar.addfile(member)
                    continue
                links[info.st_ino] = name
                with open(path, "rb") as content:
                    tar.addfile(member, content)
                continue
            tar.addfile(member)
            if member.isdir() and OPAQUE in os.listxattr(path, follow_symlinks=False):
                tar.addfile(tarfile.TarInfo(f"{name}/.wh..wh..opq"))
