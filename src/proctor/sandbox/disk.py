"""Where the private upper layer lives, so that its bytes and files are capped by the kernel.

- `memory`: a tmpfs with `size` and `nr_inodes`, made by the launcher. Fast; charged to the sandbox's memory limit, of
  which an eighth (16 MB at least) always stays with the processes.
- `loop`: a sparse ext4 image of exactly that size and number of inodes. The image is copied from a template that is
  formatted once per size (a 1 GiB image is about 100 KiB of metadata, so a copy takes a fraction of a millisecond),
  and loses its name as soon as it is attached, so nothing can be left behind.
- `auto`: memory when the disk fits into the memory limit and the kernel can give a tmpfs the ids of a sandbox (Linux
  6.3 and later), else loop. What it can do is learnt from the first launch that tries, not from its version.

XFS and ext4 project quotas would do too, but need a file system that most machines do not have.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Literal

from proctor.common import InfraError, RefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox.contract import Resources

Driver = Literal["memory", "loop"]

_SMALLEST_LOOP_MB = 8
_MKFS_TIMEOUT_S = 60
# No journal: the image never outlives its sandbox. Lazy tables keep the template sparse. No reserved blocks: the cap
# is the cap. No lost+found in the way of the upper: the launcher uses directories of its own.
_FEATURES = "^has_journal,^resize_inode,sparse_super2"


NO_MEMORY_REASON = "this kernel has no id-mapped tmpfs"


def choose(resources: Resources, *, memory_works: bool = True) -> Driver:
    """The driver for these resources; refuses what neither can honour. `memory_works`: as far as is known."""
    if resources.disk_mb < 1 or resources.disk_inodes < 16:
        raise RefusedError("needs at least 1 MB and 16 files", field="resources.disk_mb")
    driver = resources.disk_driver
    if driver == "auto":
        driver = "memory" if memory_works and resources.disk_mb <= resources.memory_mb else "loop"
    if driver == "loop" and resources.disk_mb < _SMALLEST_LOOP_MB:
        raise RefusedError(
            f"a loop image has at least {_SMALLEST_LOOP_MB} MB",
            field="resources.disk_mb",
            remedy="use the memory driver" if memory_works else f"ask for more: {NO_MEMORY_REASON}",
        )
    return driver


def memory_size_mb(resources: Resources) -> int:
    """The size of a `memory` upper: what was asked for, but never so much that a full disk starves the processes.

    Its pages count against `memory_mb`, so the last megabytes could only ever be had by being killed for them.
    """
    kept_for_processes = max(16, resources.memory_mb // 8)
    return max(min(resources.disk_mb, resources.memory_mb - kept_for_processes), 1)


class Templates:
    """Formatted ext4 images, one per size and inode count, below `root`; shared by all Edges of a home."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def make(self, target: Path, disk_mb: int, inodes: int) -> None:
        """Write a fresh image of `disk_mb` MB with room for `inodes` files to `target`. Blocking."""
        template = self._template(disk_mb, inodes)
        try:
            _copy_sparse(template, target)
        except OSError as error:
            target.unlink(missing_ok=True)
            raise InfraError(
                f"cannot make the disk image {target}: {error.strerror}", remedy="free disk space"
            ) from error

    def _template(self, disk_mb: int, inodes: int) -> Path:
        path = self._root / f"ext4-{disk_mb}m-{inodes}i.img"
        if path.exists():
            return path
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self._root / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                part = path.with_suffix(".part")
                _format(part, disk_mb, inodes)
                with part.open("rb") as file:
                    os.fsync(file.fileno())  # a template must not be found empty after a power cut
                part.rename(path)
        return path


def _format(path: Path, disk_mb: int, inodes: int) -> None:
    mkfs = shutil.which("mkfs.ext4", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if mkfs is None:
        raise RefusedError(
            "mkfs.ext4 is not installed", field="resources.disk_driver", remedy="install e2fsprogs, or use `memory`"
        )
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(disk_mb << 20)
    # 16 more for the root, the launcher's own directories and ext4's reserved ones; and mkfs rounds down in every block
    # group of 128 MB.
    count = inodes + 16 + 64 * (disk_mb // 128 + 1)
    options = [
        "-N",
        str(count),
        "-m",
        "0",
        "-O",
        _FEATURES,
        "-E",
        "lazy_itable_init=1,nodiscard,packed_meta_blocks=1",
    ]
    done = subprocess.run(
        [mkfs, "-q", "-F", *options, str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_MKFS_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        path.unlink(missing_ok=True)
        raise RefusedError(
            f"mkfs.ext4 refused {disk_mb} MB with {inodes} files: {done.stderr.decode(errors='replace').strip()}",
            field="resources.disk_inodes",
        )


def _copy_sparse(source: Path, target: Path) -> None:
    with open(source, "rb") as template, open(target, "xb") as copy:
        os.fchmod(copy.fileno(), 0o600)
        size = os.fstat(template.fileno()).st_size
        copy.truncate(size)
        position = 0
        while position < size:
            try:
                start = os.lseek(template.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            end = os.lseek(template.fileno(), start, os.SEEK_HOLE)
            while start < end:
                moved = os.copy_file_range(template.fileno(), copy.fileno(), end - start, start, start)
                if not moved:
                    raise OSError(errno.EIO, "the template ended early")
                start += moved
            position = end
