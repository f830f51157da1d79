"""Copying files and trees into a sandbox and out of it."""

from __future__ import annotations

import logging
import stat
from functools import partial
from typing import TYPE_CHECKING

from proctor.common import ConfigError
from proctor.sandbox.native.tree import directory_to_tree, open_archive, tar_to_tree, tree_to_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proctor.sandbox.native.channel import GuestChannel

log = logging.getLogger(__name__)

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_CHUNK = 1 << 20


async def upload(guest: GuestChannel, source: Path, target: str, user: str | None) -> None:
    """Copy `source` to `target`: a directory's content, an archive's content, or one file.

    A file goes into `target` if that ends with a slash, else becomes `target`. Its mode is kept, its owner is `user`.
    """
    mode = _mode(source)
    if stat.S_ISDIR(mode):
        await guest.unpack(target, directory_to_tree(source), user=user)
    elif not stat.S_ISREG(mode):
        raise ConfigError(f"{source} is neither a file nor a directory", field="source")
    elif source.name.endswith(_ARCHIVES):
        await guest.unpack(target, _archive(source), user=user)
    else:
        path = target + source.name if target.endswith("/") else target
        await guest.write_stream(path, _content(source), mode=stat.S_IMODE(mode) & 0o777, user=user)


async def download(guest: GuestChannel, path: str, target: Path) -> None:
    """Copy `path` to `target`. Links are written as links and never followed; what cannot be carried is logged."""
    for skipped in await guest.pull(path, partial(tree_to_directory, target=target)):
        log.warning("download of %s: %s", path, skipped)


def _mode(source: Path) -> int:
    try:
        return source.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}", field="source") from error


def _archive(path: Path) -> Iterator[bytes]:
    with open_archive(path) as stream:
        yield from tar_to_tree(stream)


def _content(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
