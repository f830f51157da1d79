"""Programs of others that a runtime runs: where they are, and what they said before they failed."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

_LOG_BYTES = 1 << 16


def find_program(name: str, home: Path) -> Path | None:
    """The executable that `scripts/setup --runtimes` put below `home`, else the one in PATH."""
    own = home / "bin" / name
    if os.access(own, os.X_OK):
        return own
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/local/bin:/usr/sbin:/sbin")
    return Path(found).resolve() if found is not None else None


class ErrorLog:
    """A file in memory for a program's standard error, which can hold so much and no more."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(f"proctor-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, _LOG_BYTES)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)

    def last_line(self) -> str:
        """The last line that was written, cut to a length that fits into an error."""
        lines = os.pread(self.descriptor, _LOG_BYTES, 0).rstrip(b"\0\n").splitlines()
        return lines[-1].decode("utf-8", "replace")[-500:] if lines else ""

    def close(self) -> None:
        """Free it."""
        os.close(self.descriptor)
