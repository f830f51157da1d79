"""What of a frozen upper may enter the clean room, and putting everything else back. The plan is pure.

Masking happens in the room itself, before anything runs there: paths that must not cross are removed, and what the
image had in their place is restored from its layers. Nothing is copied that may stay, whatever its size.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from proctor.grading.deliverable import Dropped, Reason
from proctor.grading.diffing import LINK
from proctor.grading.room import discard
from proctor.grading.trees import View
from proctor.sandbox.layers import diff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from proctor.sandbox.contract import DiffEntry, Image, Layer, Sandbox

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/boot", "/run", "/var/spool",
          "/var/lib/dpkg", "/var/lib/apt", "/dev", "/proc", "/sys")  # fmt: skip
VERIFIER = ("/tests", "/logs", "/solution")
_PLACES = ("/logs", "/home", "/root", "/tmp", "/opt", "/var", "/var/tmp")
"""Directories that the verifier needs as such; a file or a link in their place does not cross."""
KEPT_LOGS = "/logs/artifacts"
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_UP = frozenset({"sitecustomize.py", "usercustomize.py", ".bashrc", ".profile", ".bash_profile", ".bash_login",
                       ".zshrc", ".zshenv", ".inputrc", ".netrc", ".pdbrc", ".pythonrc.py"})  # fmt: skip
_TEST_CONFIG = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg",
                          "pyproject.toml", "setup.py"})  # fmt: skip
_PLAIN = 0o1777


@dataclass(frozen=True, slots=True)
class Policy:
    """What the image and the task say about places: the workdir, and directories that programs are found in."""

    workdir: str
    program_dirs: tuple[str, ...]
    system: bool = False
    mounts: tuple[str, ...] = ()
    """Places that the machine mounts over: what an upper has there is never seen, or is the mount point itself."""
    protects: Callable[[str], bool] | None = None
    """Further paths that a task's tests protect."""

    def is_workspace(self, path: str) -> bool:
        """Inside the workdir, which may lie in a system directory (`/usr/src/app`, `/opt/app`)."""
        return self.workdir.count("/") > 1 and _below(path, (self.workdir,))

    @classmethod
    def of(cls, image: Image, workdir: str, *, system: bool) -> Policy:
        """The policy for one image."""
        path = f"{image.env.get('PATH', '')}:{_DEFAULT_PATH}"
        dirs = dict.fromkeys(part.rstrip("/") for part in path.split(":") if part.startswith("/") and part != "/")
        mounts = ("/proc", "/dev", "/sys", *(mount.target.rstrip("/") for mount in image.mounts))
        return cls(workdir.rstrip("/"), tuple(dirs), system, mounts)


@dataclass(slots=True)
class SanitisePlan:
    """`remove`: paths to take out (a directory with everything below); `restore`: files and links that the image had
    there, with their modes; `plain`: files that stay, without set-id bits and capabilities."""

    remove: list[str] = field(default_factory=list)
    restore: dict[str, int] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    plain: dict[str, int] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)


def reason_to_drop(entry: DiffEntry, policy: Policy) -> Reason | None:
    """Why a changed path must not cross, from its name and kind alone; None when it may."""
    path, name = entry.path, entry.path.rsplit("/", 1)[-1]
    parts = path.strip("/").split("/")
    if _below(path, VERIFIER) and not _below(path, (KEPT_LOGS,)) and path != "/logs":
        return "verifier"
    if path in _PLACES and entry.kind != "dir" and entry.change != "deleted":
        return "verifier"
    if entry.kind not in ("file", "dir", "link"):
        return "special"
    if "__pycache__" in parts or name.endswith((".pyc", ".pyo")):
        return "bytecode"
    if name in _START_UP or name.endswith(".pth"):
        return "startup"
    if not policy.system:
        if _below(path, SYSTEM) and not policy.is_workspace(path):
            return "system"
        if _in_dotted_home(parts):
            return "startup"
        if _below(path, policy.program_dirs):
            return "shadow"
    if path == "/etc/ld.so.preload":
        return "system"
    if name in _TEST_CONFIG and not _below(path, (policy.workdir,) if policy.workdir else ()) and len(parts) == 1:
        return "test-config"
    if len(parts) == 1 and name.startswith("."):
        return "startup"
    return None


def make_plan(entries: Iterable[DiffEntry], base: View, frozen: View, policy: Policy) -> SanitisePlan:
    """Decide about every changed path. A directory that may cross is looked into, one that may not goes as a whole."""
    plan = SanitisePlan()
    gone: list[str] = []
    for entry in entries:
        if _is_mounted_over(entry, policy) or any(entry.path.startswith(parent + "/") for parent in gone[-1:]):
            continue
        reason = reason_to_drop(entry, policy)
        if reason is None and not policy.system and _in_base_site(entry.path, base):
            reason = "startup"
        if reason is None and policy.protects is not None and policy.protects(entry.path):
            reason = "test-config"
        if reason is None:
            _keep(entry, frozen, plan)
            continue
        before = base.stat(entry.path)
        is_same_kind_dir = entry.kind == "dir" and entry.change != "deleted" and before is not None
        if is_same_kind_dir and before is not None and stat.S_ISDIR(before.st_mode):
            # Only the directory's own metadata differs; what is below it is judged path by path.
            continue
        plan.dropped.append(Dropped(entry.path, reason))
        if entry.change != "deleted":
            plan.remove.append(entry.path)
            if entry.kind == "dir":
                gone.append(entry.path)
        _restore(entry.path, base, plan)
    return plan


def _is_mounted_over(entry: DiffEntry, policy: Policy) -> bool:
    if _below(entry.path, policy.mounts):
        return True
    return entry.kind == "dir" and any(mount.startswith(entry.path + "/") for mount in policy.mounts)


def _keep(entry: DiffEntry, frozen: View, plan: SanitisePlan) -> None:
    if entry.kind != "file" or entry.change == "deleted":
        return
    if entry.mode & 0o6000 or frozen.has_capability(entry.path):
        plan.plain[entry.path] = entry.mode & 0o777


def _restore(path: str, base: View, plan: SanitisePlan) -> None:
    for found, info in base.walk(path):
        if stat.S_ISDIR(info.st_mode):
            plan.directories.append(found)
        elif stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
            plan.restore[found] = LINK if stat.S_ISLNK(info.st_mode) else stat.S_IMODE(info.st_mode) & _PLAIN


def _below(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)


def _in_dotted_home(parts: list[str]) -> bool:
    """`/root/.x` and `/home/*/.x`: settings and programs that shells and tools pick up."""
    if parts[0] == "root":
        return len(parts) > 1 and parts[1].startswith(".")
    return parts[0] == "home" and len(parts) > 2 and parts[2].startswith(".")


def _in_base_site(path: str, base: View) -> bool:
    """Inside a site directory that the image has: its packages are part of the environment, not of the work."""
    parts = path.split("/")
    for index, part in enumerate(parts[:-1]):
        if part in ("site-packages", "dist-packages"):
            return base.is_dir("/".join(parts[: index + 1]))
    return False


def read_plan(frozen_layer: Layer, layers: Sequence[Layer], policy: Policy) -> SanitisePlan:
    """Compare a frozen upper with the layers under it, and plan. Blocking; run it in a thread."""
    descriptor = os.open(frozen_layer.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        entries = diff(descriptor, layers)
    finally:
        os.close(descriptor)
    with View(layers) as base, View([*layers, frozen_layer]) as frozen:
        return make_plan(entries, base, frozen, policy)


async def apply_plan(box: Sandbox, plan: SanitisePlan, layers: Sequence[Layer]) -> None:
    """Carry the plan out in the room, by file operations of the guest alone: no program of the disk runs.

    `layers` are the image's, from which files are restored (as root's, whoever owned them).
    """
    for path in plan.remove:
        await discard(box, path)
    for path in plan.directories:
        await box.mkdir(path)
    if plan.restore:
        with tempfile.TemporaryDirectory(prefix="proctor-restore-") as folder:
            archive = Path(folder) / "restore.tar"
            await anyio.to_thread.run_sync(_write_archive, archive, plan.restore, layers)
            await box.upload(archive, "/")
    for path, mode in plan.plain.items():
        data = await box.read(path)
        await discard(box, path)
        await box.write(path, data, mode=mode)


def _write_archive(target: Path, files: Mapping[str, int], layers: Sequence[Layer]) -> None:
    with View(layers) as base, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for path, mode in files.items():
            state = base.state(path)
            if state is None:
                continue
            member = tarfile.TarInfo(path.lstrip("/"))
            if mode == LINK:
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(state.data)
                tar.addfile(member)
            else:
                member.mode, member.size = mode, len(state.data)
                tar.addfile(member, BytesIO(state.data))
