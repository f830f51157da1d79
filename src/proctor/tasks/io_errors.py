"""A file that cannot be read or a disk that is full: one clear error instead of a traceback."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from proctor.common import ConfigError, InfraError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG}
_REMEDIES = {errno.ENOSPC: "free some space and start again", errno.EDQUOT: "free some space and start again"}


@contextmanager
def clear_errors(doing: str, place: Path) -> Iterator[None]:
    """Turn an OSError into an InfraError (the machine's fault) or a ConfigError (the path's); the file is named."""
    try:
        yield
    except OSError as error:
        number, name = _first(error)
        kind = InfraError if number in _MACHINE else ConfigError
        message = f"cannot {doing}: {os.strerror(number) if number else error}"
        raise kind(message, field=str(name or place), remedy=_REMEDIES.get(number)) from error


def _first(error: OSError) -> tuple[int, str | bytes | None]:
    """Number and file of an error; `shutil` raises a list of them, of which the first is told."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list) and error.args[0]:
        _, target, why = error.args[0][0]
        found = re.search(r"\[Errno (\d+)\]", str(why))
        return int(found.group(1)) if found else 0, str(target)
    return error.errno or 0, error.filename
