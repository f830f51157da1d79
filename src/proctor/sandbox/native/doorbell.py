"""Where a launcher that outlives its Edge is found: a socket to knock at, and a lock that it holds as long as it lives.

Both are in the Edge's own directory (0700); the socket is 0600, and the launcher asks the kernel who knocks.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOCKET = "launcher.sock"
LOCK = "launcher.lock"


@contextmanager
def reachable(folder: Path) -> Iterator[str]:
    """A short name for a directory: the address of a Unix socket holds 108 bytes, a path may be longer."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def hang(folder: Path) -> tuple[socket.socket, int]:
    """A listening socket and a held lock for a new launcher, which gets copies of both; the caller closes them."""
    with suppress(FileNotFoundError):
        os.unlink(folder / SOCKET)
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with reachable(folder) as short:
            bell.bind(f"{short}/{SOCKET}")
        os.chmod(folder / SOCKET, 0o600)
        bell.listen(4)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except BaseException:
        bell.close()
        raise
    fcntl.flock(lock, fcntl.LOCK_EX)  # nobody else can have it: the Edge's directory is ours
    return bell, lock


def knock(folder: Path) -> socket.socket:
    """A connection to the launcher of `folder`. Raises OSError where none listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with reachable(folder) as short:
            sock.connect(f"{short}/{SOCKET}")
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def is_home(folder: Path) -> bool:
    """Whether a launcher of `folder` lives."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
