"""A build room made of namespaces and chroot, for building images only.

Build steps come from whoever wrote the recipe or Dockerfile, who is trusted as far as a package's installer is: the room keeps
processes and mounts from outliving the build, it is not a prison. Candidates never run in it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tarfile
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from anyio.streams.text import TextReceiveStream

from proctor.sandbox.contract import ImageError, Layer
from proctor.sandbox.images.tools import Progress, require_root, require_tool, silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BUILD_DIR = "/run/proctor-build"
_SCRIPT = r"""
set -e
cd "$1"
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$2,upperdir=$3/upper,workdir=$3/work,redirect_dir=off,metacopy=off,index=off" "$3/root"
cd "$3/root"
mkdir -p proc dev sys run/proctor-build etc
[ -e etc/resolv.conf ] || [ -L etc/resolv.conf ] || : > etc/resolv.conf
mount -t proc -o nosuid,nodev,noexec proc proc
mount -t tmpfs -o nosuid,mode=755,size=64k tmpfs dev
for name in null zero full random urandom tty; do : > "dev/$name"; mount --bind "/dev/$name" "dev/$name"; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
mount --bind "$3/build" run/proctor-build
[ ! -f etc/resolv.conf ] || mount --bind /etc/resolv.conf etc/resolv.conf
shift 3
exec chroot . "$@"
"""
_KEPT_LINES = 60


class ChrootRoom:
    """One step's room: a stack of layers below, a fresh upper directory, the network of this machine."""

    def __init__(self, layers: Sequence[Layer], scratch: Path, build_files: Mapping[str, bytes]) -> None:
        require_root("an image build")
        self._unshare = require_tool("unshare", "util-linux")
        self._layers = layers
        self._scratch = scratch
        for name in ("upper", "work", "root", "build"):
            (scratch / name).mkdir()
            (scratch / name).chmod(0o755)
        for name, data in build_files.items():
            (scratch / "build" / name).write_bytes(data)
            (scratch / "build" / name).chmod(0o644)

    def finish(self) -> Path:
        """What was changed: the upper directory, without the room's own mount points."""
        upper = self._scratch / "upper"
        for name in (BUILD_DIR[1:], "run", "dev", "proc", "sys"):
            # Empty and in a layer below: the room made or touched it, the command did not.
            if (upper / name).is_dir() and any((layer.path / name).is_dir() for layer in self._layers):
                with suppress(OSError):
                    (upper / name).rmdir()
        if (upper / BUILD_DIR[1:]).is_dir():
            (upper / BUILD_DIR[1:]).rmdir()
            with suppress(OSError):
                (upper / "run").rmdir()
        return upper

    def _command(self, argv: Sequence[str]) -> list[str]:
        parent = self._layers[0].path.parent
        lower = ":".join(layer.path.name for layer in reversed(self._layers))
        flags = ["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--propagation", "private"]
        return [
            self._unshare, *flags, "/bin/sh", "-c", _SCRIPT, "room", str(parent), lower, str(self._scratch), *argv
        ]  # fmt: skip

    async def run(
        self,
        command: str,
        *,
        cwd: str,
        env: Mapping[str, str],
        what: str,
        progress: Progress = silent,
        step: int = 0,
        total: int = 0,
    ) -> None:
        """Run shell text; ImageError with its last lines if it fails."""
        text = f"mkdir -p {shlex.quote(cwd)} && cd {shlex.quote(cwd)} && {{ {command}\n}}"
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        async with await anyio.open_process(
            self._command(["/bin/sh", "-c", text]),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            pending = ""
            async for chunk in TextReceiveStream(process.stdout, errors="replace"):
                *complete, pending = (pending + chunk).split("\n")
                for line in complete:
                    lines.append(line)
                    progress(step, total, line.rstrip())
            lines.append(pending)
            code = await process.wait()
        if code != 0:
            tail = " | ".join(line.strip() for line in list(lines)[-8:] if line.strip()) or "it printed nothing"
            raise ImageError(f"{what} failed with exit code {code}: {tail}")

    async def unpack(self, archive: Path, to: str, *, what: str) -> None:
        """Extract an uncompressed tar (made by us) into `to`, as the room sees that path."""
        script = f"mkdir -p {shlex.quote(to)} && tar -C {shlex.quote(to)} --no-same-owner -xpf {BUILD_DIR}/files.tar"
        target = self._scratch / "build" / "files.tar"
        os.replace(archive, target)
        try:
            await self.run(script, cwd="/", env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, what=what)
        finally:
            target.unlink()


def pack(sources: Sequence[tuple[Path, str]], target: Path) -> None:
    """Write an uncompressed tar of files and directory contents, owned by root, times kept."""

    def owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for source, name in sources:
            tar.add(source, arcname=name, filter=owned_by_root)
