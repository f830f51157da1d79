"""Who a command runs as and what it finds in its environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from proctor.sandbox.contract import FileError, Image, SandboxSpec

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSWD_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class User:
    """`ask` is what the guest is asked for (None: root); `name` and `home` go into the environment."""

    ask: str | None
    name: str
    home: str


_ROOT = User(None, "root", "/root")
_ROOT_NAMES = frozenset({"", "root", "0", "0:0", "root:root", "root:0", "0:root"})


class _Reader(Protocol):
    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes: ...


def default_environment(spec: SandboxSpec, image: Image) -> dict[str, str]:
    """The environment that is the same for every command: defaults, then the image's, then the spec's."""
    return {"PATH": PATH, "LANG": "C.UTF-8", **image.env, **spec.env}


class Users:
    """Looks users up in the sandbox's own /etc/passwd, once per incarnation. The guest looks up for itself."""

    def __init__(self, default: str | None) -> None:
        self._default = default or "root"
        self._known: dict[str, User] = {}

    def forget(self) -> None:
        """The disk has changed under us."""
        self._known.clear()

    async def find(self, user: str | None, guest: _Reader) -> User:
        """The user called `user` (name, `uid`, `uid:gid`), or the default one."""
        wanted = self._default if user is None else user
        if wanted in _ROOT_NAMES:
            return _ROOT
        if wanted not in self._known:
            self._known[wanted] = await self._look_up(wanted, guest)
        return self._known[wanted]

    @staticmethod
    async def _look_up(wanted: str, guest: _Reader) -> User:
        who = wanted.partition(":")[0]
        try:
            text = (await guest.read("/etc/passwd", max_bytes=_PASSWD_MAX)).decode("utf-8", "replace")
        except FileError:
            text = ""
        for line in text.splitlines():
            parts = line.split(":")
            if len(parts) >= 6 and who in (parts[0], parts[2]):
                return User(wanted, parts[0], parts[5] or "/")
        return User(wanted, who, "/")
