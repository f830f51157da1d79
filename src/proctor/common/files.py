"""Files that are either whole or absent, and the place where Proctor keeps its state."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def state_dir() -> Path:
    """Where images, layers and journals live: `$PROCTOR_HOME`, else a per-user default.

    Root: `/var/lib/proctor`. Others: `$XDG_STATE_HOME/proctor` or `~/.local/state/proctor`.
    """
    if home := os.environ.get("PROCTOR_HOME"):
        return Path(home)
    if os.geteuid() == 0:
        return Path("/var/lib/proctor")
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "proctor"


def atomic_write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
