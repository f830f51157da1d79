"""Content digests and the canonical JSON they are computed over."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20


def canonical_json(value: Any) -> bytes:
    """Serialise `value` so that equal values give equal bytes (sorted keys, no spaces, UTF-8, finite numbers).

    Raises ValueError for NaN and infinities: they have no JSON form, and a score must never hold one.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "surrogatepass"
    )


def digest_bytes(data: bytes) -> str:
    """`sha256:<64 hex>` of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """Digest of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value))


def digest_file(path: Path) -> str:
    """Digest of a file's bytes, read in chunks."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return "sha256:" + hasher.hexdigest()


def digest_tree(root: Path, *, ignore: frozenset[str] = frozenset()) -> str:
    """Digest of a directory: relative names, kinds, executable bits, link targets and contents.

    Owners and times do not count, so a copy or a checkout of the same tree has the same digest.
    `ignore` holds base names that are left out at any depth.
    """
    entries: list[list[str]] = []
    for folder, dirs, files in os.walk(root):
        dirs[:] = sorted(d for d in dirs if d not in ignore)
        for name in sorted([*files, *(d for d in dirs if os.path.islink(os.path.join(folder, d)))]):
            if name in ignore:
                continue
            path = Path(folder, name)
            relative = os.fsencode(path.relative_to(root)).hex()
            if path.is_symlink():
                entries.append([relative, "link", os.fsencode(os.readlink(path)).hex()])
            elif path.is_file():
                kind = "exec" if path.stat().st_mode & 0o100 else "file"
                entries.append([relative, kind, digest_file(path)])
    return digest_json(sorted(entries))
