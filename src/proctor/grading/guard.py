"""Who may write the reward: watched, and decided, from the host while the verifier runs.

Every open of a reward file in the room's /logs/verifier waits in the kernel until the host has looked at the process
that asks: only the verifier's main process and its direct children may. Code under test runs further down the tree,
or has left it. At the end the file that is there must be one that such a process wrote; one that was renamed or linked
into place is not. See docs/design/clean-room.md for what this proves and what it does not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import anyio.to_thread

from proctor.grading._fanotify import FAN_OPEN_PERM, DirectoryWatch, Event
from proctor.grading.contract import GradeFinding

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from proctor.sandbox.contract import Sandbox

T = TypeVar("T")

NAMES = ("reward.json", "reward.txt")
_MAIN_DEADLINE_S = 10.0


@dataclass(slots=True)
class _Watched:
    """What was seen. Inode numbers are those of the room's own file system."""

    main: int | None = None
    writers: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)


class RewardGuard:
    """Guards the reward files of a directory. Use as an async context manager around the verifier's run.

    Where the kernel or our rights do not allow the watch, the guard says so in a finding, and the weaker rules
    (names, leftovers) are all there is.
    """

    def __init__(self, box: Sandbox, directory: str) -> None:
        self._box = box
        self._directory = directory
        self._seen = _Watched()
        self._root = -1
        self._folder = -1
        self._watch: DirectoryWatch | None = None
        self._guest: int | None = getattr(box, "host_pid", None)
        self._why_not = ""

    async def __aenter__(self) -> Self:
        if self._guest is None:
            self._why_not = "the sandbox does not tell its process id"
            return self
        try:
            self._folder = _open_inside(self._guest, self._directory)
            self._watch = DirectoryWatch(self._folder, self._decide)
        except OSError as error:
            self._why_not = str(error)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._watch.close)
        if self._folder >= 0:
            os.close(self._folder)

    async def beside(self, command: Awaitable[T]) -> T:
        """Run the verifier's command while its main process is looked for: the first child of the guest, which
        has no other while we watch."""
        finder = anyio.CancelScope()
        outcome: list[T] = []
        error: list[Exception] = []

        async def find() -> None:
            with finder, anyio.move_on_after(_MAIN_DEADLINE_S):
                while self._watch is not None and self._guest is not None and self._seen.main is None:
                    self._seen.main = _first_child(self._guest)
                    await anyio.sleep(0.001)

        async with anyio.create_task_group() as group:
            group.start_soon(find)
            try:
                outcome.append(await command)
            except Exception as raised:  # kept whole: a task group would wrap it
                error.append(raised)
            finder.cancel()
        if error:
            raise error[0]
        return outcome[0]

    async def findings(self) -> list[GradeFinding]:
        """What was seen. `reward-writer` with severity `disqualify`: the file that is there was not written by the
        verifier, so it must not be believed."""
        if self._watch is None:
            return [GradeFinding("unguarded", f"who writes the reward was not watched: {self._why_not}")]
        await anyio.to_thread.run_sync(self._watch.close)
        found = [GradeFinding("reward-attempt", text, "review") for text in self._seen.refused[:10]]
        for name in NAMES:
            inode = _inode(self._guest, self._directory, name)
            if inode is not None and (inode not in self._seen.written or self._watch.overflowed):
                found.append(GradeFinding("reward-writer", f"{name} was not written by the verifier", "review"))
        return found

    def _decide(self, event: Event) -> bool:
        path = os.readlink(f"/proc/self/fd/{event.fd}")
        name = path.removesuffix(" (deleted)").rsplit("/", 1)[-1]
        if name not in NAMES:
            return True
        inode = os.fstat(event.fd).st_ino
        if not event.mask & FAN_OPEN_PERM:
            if event.pid in self._seen.writers:
                self._seen.written.add(inode)
            else:
                self._seen.written.discard(inode)
                self._seen.refused.append(f"{name} was written through a descriptor that process {event.pid} inherited")
            return True
        main = self._seen.main if self._seen.main is not None else _first_child(self._guest or -1)
        self._seen.main = main
        if main is not None and (event.pid == main or _parent(event.pid) == main):
            self._seen.writers.add(event.pid)
            return True
        self._seen.refused.append(f"{name}: opening it was refused to {_describe(event.pid, main)}")
        return False


def _open_inside(guest: int, path: str) -> int:
    """A directory of the room, opened from outside without following a link on the way."""
    current = os.open(f"/proc/{guest}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in path.strip("/").split("/"):
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
        finally:
            os.close(current)
        current = below
    return current


def _inode(guest: int | None, directory: str, name: str) -> int | None:
    """The inode of a file that is there now, by its path (the directory may have been replaced meanwhile)."""
    if guest is None:
        return None
    try:
        folder = _open_inside(guest, directory)
    except OSError:
        return None
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None
    finally:
        os.close(folder)


def _first_child(guest: int) -> int | None:
    """The oldest child of the guest."""
    try:
        with open(f"/proc/{guest}/task/{guest}/children", encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
    except OSError:
        return None
    started = {child: _stat(child)[1] for child in children}
    return min(children, key=lambda child: (started[child], child), default=None)


def _stat(pid: int) -> tuple[int, int]:
    """Parent and start time of a process; (0, 0) when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[19])


def _parent(pid: int) -> int:
    return _stat(pid)[0]


def _describe(pid: int, main: int | None) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = file.read().strip()
    except OSError:
        name = "?"
    left = main is None or _parent(pid) == _parent(main)
    kind = "a process that left the verifier's tree" if left else "a process below the verifier's children"
    return f"{name!r}, {kind}"
