"""The room of a build step: a sandbox on the layers so far, with the machine's network; what it changed becomes a
layer.

A step is somebody else's code, so it gets what a candidate gets: its own namespaces, no privileges on the machine,
limits. Only the network is open, because packages come from there, and certificates, proxies and apt settings are
mounted for the time of the step.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tarfile
from collections import deque
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio

from proctor.common import digest_json
from proctor.sandbox.contract import (
    Image,
    ImageError,
    Layer,
    Lifecycle,
    Mount,
    OutputLimit,
    Resources,
    Sandbox,
    SandboxSpec,
)
from proctor.sandbox.images import tree
from proctor.sandbox.images.machine import BUILD_DIR, build_files
from proctor.sandbox.images.tools import Progress, require_root, silent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from proctor.sandbox.images.store import Workspace

_KEPT_LINES = 60
_STEP_TTL_S = 4 * 3600.0
_MEMORY_MB = 4096
_DISK_MB = 32_768
_INODES = 2_000_000
_FILES = "files.tar"
_RESOLVER = "/etc/resolv.conf"


class BuildRoom:
    """An open room; `finish` ends it and says what changed."""

    def __init__(self, box: Sandbox, layers: Sequence[Layer], workspace: Workspace, folder: Path) -> None:
        self._box = box
        self._folder = folder
        self._layers = layers
        self._workspace = workspace

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
        """Run shell text as root in `cwd` (made if it is missing); ImageError with its last lines if it fails."""
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        pending = {"stdout": "", "stderr": ""}

        def on_output(stream: Literal["stdout", "stderr"], data: bytes) -> None:
            *complete, pending[stream] = (pending[stream] + data.decode("utf-8", "replace")).split("\n")
            for line in complete:
                lines.append(line)
                if line.strip():
                    progress(step, total, line.rstrip())

        where = shlex.quote(cwd)
        result = await self._box.exec(
            ["/bin/sh", "-c", f"mkdir -p {where} && cd {where} && {{ {command}\n}}"],
            cwd="/",
            env=env,
            user="root",
            on_output=on_output,
            limit=OutputLimit(head_bytes=0, tail_bytes=1 << 16),
        )
        if result.ok:
            return
        lines.extend(text for text in pending.values() if text)
        tail = " | ".join(line.strip() for line in list(lines)[-8:] if line.strip()) or "it printed nothing"
        end = str(result.reason) if result.reason else f"exit code {result.exit_code}"
        if result.signal:
            end = f"signal {result.signal}" + (f", {result.reason}" if result.reason else "")
        raise ImageError(f"{what} failed with {end}: {tail}")

    async def unpack(self, archive: Path, to: str) -> None:
        """Put the content of a tar that `pack` wrote into `to`, as the room sees that path."""
        shutil.move(archive, self._folder / _FILES)
        where = shlex.quote(to)
        script = f"mkdir -p {where} && exec tar -C {where} --no-same-owner -xpf {BUILD_DIR}/{_FILES}"
        result = await self._box.exec(["/bin/sh", "-c", script], cwd="/", user="root")
        (self._folder / _FILES).unlink()
        if not result.ok:
            raise ImageError(f"files cannot be put into {to}: {result.error_text.strip()[-300:]}", field="to")

    async def finish(self) -> Path:
        """End the step: a directory of the workspace that holds what was changed."""
        frozen = await self._box.snapshot()
        target = self._workspace.directory("upper")
        await anyio.to_thread.run_sync(_copy_tree, frozen.path, target)
        self._remove_mount_points(target)
        return target

    def _remove_mount_points(self, upper: Path) -> None:
        """What is there only because something was mounted: empty, and nothing that the step wrote."""
        with suppress(OSError):
            (upper / BUILD_DIR[1:]).rmdir()
        for name in ("run", "dev", "proc", "sys"):
            # Also an empty copy of a directory below that was only touched; a new or an opaque one stays.
            path = upper / name
            if not path.is_dir() or tree.is_opaque(os.fsencode(path)):
                continue
            if any((layer.path / name).is_dir() for layer in self._layers):
                with suppress(OSError):
                    path.rmdir()


@asynccontextmanager
async def build_room(layers: Sequence[Layer], workspace: Workspace, *, title: str = "") -> AsyncIterator[BuildRoom]:
    """A room on `layers` (lowest first). Its sandbox is closed at the end, whatever happens."""
    require_root("an image build")
    from proctor.sandbox.edge import create

    folder = workspace.directory("build-files")
    for name, data in build_files().items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o644)
    spec = SandboxSpec(
        image=Image(ref="build", digest=digest_json([layer.digest for layer in layers]), layers=tuple(layers)),
        mounts=_mounts(folder, layers),
        resources=_resources(workspace.path),
        lifecycle=Lifecycle(ttl_s=_STEP_TTL_S),
        network="open",
        user="root",
        labels={"build": title[:200]},
    )
    async with create(spec) as box:
        yield BuildRoom(box, layers, workspace, folder)


def _mounts(folder: Path, layers: Sequence[Layer]) -> tuple[Mount, ...]:
    mounts = [Mount(folder, BUILD_DIR)]
    if Path(_RESOLVER).exists() and any((layer.path / _RESOLVER[1:]).is_file() for layer in layers):
        mounts.append(Mount(Path(_RESOLVER).resolve(), _RESOLVER))
    return tuple(mounts)


def _resources(place: Path) -> Resources:
    """Generous, but never more than half of what the machine has."""
    total_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    free_mb = shutil.disk_usage(place).free >> 20
    return Resources(
        cpus=float(os.cpu_count() or 1),
        memory_mb=min(_MEMORY_MB, total_mb // 2),
        disk_mb=min(_DISK_MB, free_mb // 2),
        disk_inodes=_INODES,
        pids=4096,
        disk_driver="loop",
    )


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a frozen upper with everything it has: owners, times, holes, hard links, marks."""
    command = ["cp", "--archive", "--reflink=auto", "--sparse=auto", f"{source}/.", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"cannot take over the layer of a build step: {done.stderr.strip()[-300:]}")


def pack(sources: Sequence[tuple[Path, str]], target: Path) -> None:
    """Write an uncompressed tar of files and directory contents, owned by root, times kept; devices are left out."""

    def owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for source, name in sources:
            tar.add(source, arcname=name, filter=owned_by_root)
