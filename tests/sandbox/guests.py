"""A real guest without a sandbox around it (`guest-dev`), in a pid namespace of its own."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.common import new_id
from proctor.sandbox.native.channel import Attribution, GuestChannel
from proctor.sandbox.native.launcher import BINARY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_UNIFIED = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


@contextmanager
def _cgroup() -> Iterator[int | None]:
    """A cgroup2 directory for one guest, or None where there is no cgroup2."""
    mount = next((path for path in _UNIFIED if (path / "cgroup.procs").exists()), None)
    if mount is None or not (mount / "cgroup.controllers").exists():
        yield None
        return
    folder = mount / new_id("proctor-test")
    try:
        folder.mkdir()
    except OSError:  # a container whose cgroups are read-only: groups are then known by their mark
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        for child in folder.iterdir():
            if child.is_dir():
                child.rmdir()
        folder.rmdir()


@contextmanager
def guest_socket(*, cgroup: bool = False, binary: Path = BINARY) -> Iterator[socket.socket]:
    """The host's end of a fresh guest's channel."""
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        group = stack.enter_context(_cgroup()) if cgroup else None
        descriptors = [theirs.fileno()] + ([group] if group is not None else [])
        command = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", str(binary), "guest-dev"]
        process = subprocess.Popen([*command, *map(str, descriptors)], pass_fds=descriptors)
        theirs.close()
        try:
            yield ours
        finally:
            ours.close()
            process.wait(20)


@asynccontextmanager
async def dev_guest(*, cgroup: bool = True, attribution: Attribution | None = None) -> AsyncIterator[GuestChannel]:
    """A channel to a fresh guest."""
    with guest_socket(cgroup=cgroup) as sock:
        channel = GuestChannel(sock, attribution=attribution)
        async with anyio.create_task_group() as tasks:
            await tasks.start(channel.run)
            try:
                yield channel
            finally:
                channel.close()
