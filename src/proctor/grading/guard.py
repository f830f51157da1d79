"""Who may write the reward: watched, and decided, from the host while the verifier runs.

Every open of a reward file in the room's /logs/verifier waits in the kernel until the host has looked at the process
that asks: only the verifier's main process and its direct children may. Code under test runs further down the tree,
or has left it. At the end the file that is there must be one that such a process wrote; one that was renamed or linked
into place is not. See docs/design/clean-room.md for what this proves and what it does not.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import anyio.to_thread

from proctor.common import InfraError
from proctor.grading._fanotify import FAN_MOVED_TO, FAN_OPEN_PERM, DirectoryWatch, Event, NameEvent
from proctor.grading.contract import GradeFinding

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from proctor.sandbox.contract import Sandbox

T = TypeVar("T")

NAMES = ("reward.json", "reward.txt")
_MAIN_DEADLINE_S = 10.0
_OPENAT = {"x86_64": 257, "aarch64": 56}


@dataclass(slots=True)
class _Watched:
    """What was seen. Inode numbers are those of the room's own file system."""

    main: int | None = None
    writers: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    created: dict[str, set[int]] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
        self._before: set[int] = set()
        self._why_not = ""

    async def __aenter__(self) -> Self:
        if self._guest is None:
            self._why_not = "the sandbox does not tell its process id"
            return self
        # In a room there is none; a live deliverable's processes are no part of the verifier.
        self._before = set(_children(self._guest))
        try:
            self._folder = _open_inside(self._guest, self._directory)
            self._watch = DirectoryWatch(self._folder, self._decide, self._named)
        except OSError as error:
            self._close_folder()
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM):
                raise InfraError(
                    f"the reward file cannot be watched: {error}", remedy="run fewer trials at a time"
                ) from error
            self._why_not = str(error)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._watch.close)
        self._close_folder()

    def _close_folder(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    async def beside(self, command: Awaitable[T]) -> T:
        """Run the verifier's command while its main process is looked for: the first new child of the guest."""
        finder = anyio.CancelScope()
        outcome: list[T] = []
        error: list[Exception] = []

        async def find() -> None:
            with finder, anyio.move_on_after(_MAIN_DEADLINE_S):
                while self._watch is not None and self._guest is not None and self._seen.main is None:
                    self._seen.main = self._first_child()
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
        """What was seen. A `reward-writer` finding: somebody but the verifier wrote, or tried to write, a reward, so
        no reward of this run is believed."""
        if self._watch is None:
            return [GradeFinding("unguarded", f"who writes the reward was not watched: {self._why_not}")]
        await anyio.to_thread.run_sync(self._watch.close)
        seen = self._seen
        wrong = list(dict.fromkeys(seen.attempts))
        wrong += [f"{name} was made by process {pid}, not by the verifier"
                  for name, pids in seen.created.items() for pid in sorted(pids - seen.writers)]  # fmt: skip
        for name in NAMES:
            inode = _inode(self._guest, self._directory, name)
            if inode is not None and inode not in seen.written:
                wrong.append(f"{name} was not written by the verifier")
        if self._watch.overflowed:
            wrong.append("more events than the kernel could queue")
        found = [GradeFinding("reward-writer", text, "review") for text in wrong[:10]]
        return found + [GradeFinding("inherited-writer", text) for text in list(dict.fromkeys(seen.notes))[:3]]

    def _first_child(self) -> int | None:
        """The guest's oldest child that was not there before."""
        children = [] if self._guest is None else [c for c in _children(self._guest) if c not in self._before]
        return min(children, key=lambda child: (_stat(child)[1], child), default=None)

    def _named(self, event: NameEvent) -> None:
        if event.name not in NAMES:
            return
        if event.mask & FAN_MOVED_TO:
            self._seen.attempts.append(f"{event.name} was moved into place, not written")
        else:
            self._seen.created.setdefault(event.name, set()).add(event.pid)

    def _decide(self, event: Event) -> bool:
        path = os.readlink(f"/proc/self/fd/{event.fd}")
        name = path.removesuffix(" (deleted)").rsplit("/", 1)[-1]
        if name not in NAMES:
            return True
        if event.mask & FAN_OPEN_PERM:
            return self._may_open(event.pid, name)
        self._wrote(event.pid, name, os.fstat(event.fd).st_ino)
        return True

    def _may_open(self, pid: int, name: str) -> bool:
        """Writers: the main process and its children. Readers: anybody."""
        if self._seen.main is None:
            self._seen.main = self._first_child()
        main = self._seen.main
        if main is not None and (pid == main or _parent(pid) == main):
            self._seen.writers.add(pid)
            return True
        if _opens_for_reading(pid):
            return True
        self._seen.attempts.append(f"{name}: writing it was refused to {_describe(pid, main)}")
        return False

    def _wrote(self, pid: int, name: str, inode: int) -> None:
        """A write by a process that did not open the file itself came through an inherited descriptor: a shell's
        redirection for its child, which may be gone by now, or one that was handed further down."""
        parent = _parent(pid)
        if pid not in self._seen.writers and parent not in (0, self._seen.main):
            self._seen.attempts.append(f"{name} was written by {_describe(pid, self._seen.main)}")
            return
        if pid not in self._seen.writers:
            self._seen.notes.append(f"{name} was written through a descriptor that the verifier had opened")
        self._seen.written.add(inode)


def _opens_for_reading(pid: int) -> bool:
    """Whether the open that a process waits in is read-only, by the kernel's word; False when that is not plain."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            words = file.read().split()
        number, flags = int(words[0]), int(words[3], 16)
    except (OSError, ValueError, IndexError):
        return False
    if number != _OPENAT.get(os.uname().machine):
        return False
    return flags & os.O_ACCMODE == os.O_RDONLY and not flags & (os.O_CREAT | os.O_TRUNC)


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


def _children(guest: int) -> list[int]:
    try:
        with open(f"/proc/{guest}/task/{guest}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


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
