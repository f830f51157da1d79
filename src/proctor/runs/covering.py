"""Covering secrets in what a sandbox leaves: the archive of what changed on its disk."""

from __future__ import annotations

import os
import tarfile
from typing import TYPE_CHECKING

import zstandard

from proctor.agents.room import covered_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_PIECE = 1 << 20


def cover_archive(path: Path, secrets: Sequence[str]) -> bool:
    """Cover `secrets` in the files of a `.tar.zst`, in place; one without them stays as it is.

    A mask is as long as what it covers, so the archive keeps its shape. False when it does not: a secret is then part
    of a name. Raises OSError.
    """
    if not any(any(secret.encode() in piece for piece in _overlapping(path, secrets)) for secret in secrets):
        return True
    safe = path.with_name(path.name + ".covered")
    try:
        with safe.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file, closefd=False) as out:
            for piece in _covered(path, secrets):
                out.write(piece)
        if _members(safe) != _members(path):
            return False
        os.replace(safe, path)
        return True
    finally:
        safe.unlink(missing_ok=True)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as content:
        while piece := content.read(_PIECE):
            yield piece


def _overlapping(path: Path, secrets: Sequence[str]) -> Iterator[bytes]:
    """The pieces, each with the end of the one before: a secret may lie across."""
    margin = max(len(secret.encode()) for secret in secrets) - 1
    end = b""
    for piece in _pieces(path):
        yield end + piece
        end = (end + piece)[-margin:]


def _covered(path: Path, secrets: Sequence[str]) -> Iterator[bytes]:
    margin = max(len(secret.encode()) for secret in secrets) - 1
    held = b""
    for piece in _pieces(path):
        held += piece
        for secret in secrets:
            held = covered_bytes(held, secret)
        yield held[:-margin]
        held = held[-margin:]
    yield held


def _members(path: Path) -> int:
    """How many members an archive has; it is read up to the first header whose checksum is wrong."""
    try:
        with (
            path.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as content,
            tarfile.open(fileobj=content, mode="r|") as tar,
        ):
            return sum(1 for _ in tar)
    except tarfile.TarError:
        return 0
