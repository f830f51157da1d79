"""Debian releases, bootstrapped with mmdebstrap from the mirror that this machine's apt is set to use."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio

from proctor.common import RefusedError, digest_bytes
from proctor.sandbox.contract import Image, ImageError
from proctor.sandbox.images.tools import Progress, require_root, require_tool, run_tool, silent

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox.images.store import ImageStore, Workspace

RELEASES = {"bullseye": "3.9", "bookworm": "3.11", "trixie": "3.13"}
"""Releases that can be built, and the Python series of each."""

PACKAGES = ("ca-certificates", "git", "procps", "python3", "python3-pip", "python3-venv")
ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
# Fixed, so that nothing in the image depends on the day it was built (reproducible-builds.org/specs/source-date-epoch).
_EPOCH = "1735689600"
_EMPTIED = ("var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log", "tmp", "var/tmp", "run", "dev")
_REMOVED = (
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/passwd-",
    "etc/group-",
    "etc/shadow-",
    "etc/gshadow-",
    "etc/.pwd.lock",
    "var/lib/dpkg/lock",
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/status-old",
    "var/lib/dpkg/available-old",
    "var/lib/systemd/deb-systemd-helper-enabled",
    "var/cache/ldconfig/aux-cache",
    "root/.bash_history",
)
_ACQUIRE = ("Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::Check-Valid-Until", "Acquire::Check-Date")


@dataclass(frozen=True, slots=True)
class AptSettings:
    """What this machine's apt says: mirrors for releases and for security updates, and how to fetch."""

    archive: str | None
    security: str | None
    options: tuple[str, ...]

    def sources(self, release: str) -> str | None:
        """`sources.list` for a release, or None when this machine is not set to a Debian mirror."""
        if self.archive is None:
            return None
        lines = [f"deb {self.archive} {release} main", f"deb {self.archive} {release}-updates main"]
        if self.security:
            lines.append(f"deb {self.security} {release}-security main")
        return "\n".join(lines) + "\n"


def parse_apt(targets: str, configuration: str) -> AptSettings:
    """Read `apt-get indextargets` (URI|release|component lines) and `apt-config dump`."""
    archive = security = None
    for line in targets.splitlines():
        uri, _, rest = line.partition("|")
        release, _, component = rest.partition("|")
        name = release.partition("/")[0].removesuffix("-security").removesuffix("-updates")
        if component != "main" or (name not in RELEASES and name not in ("stable", "oldstable", "testing", "sid")):
            continue
        if urlsplit(uri).username:
            raise RefusedError("the apt sources hold a password", remedy="move it to /etc/apt/auth.conf")
        if release.endswith("-security") or release.endswith("/updates"):
            security = security or uri
        elif not release.endswith("-updates"):
            archive = archive or uri
    options = [line for line in configuration.splitlines() if line.split(" ")[0] in _ACQUIRE]
    return AptSettings(archive, security, tuple(options))


def machine_apt() -> AptSettings:
    """The settings of this machine's apt; empty ones where there is no apt."""
    if shutil.which("apt-get") is None:
        return AptSettings(None, None, ())
    form = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True)
    return parse_apt(targets.stdout, dump.stdout)


async def build_debian(release: str, *, store: ImageStore, progress: Progress = silent) -> Image:
    """Bootstrap a release as `debian:<release>`: the minimal system with Python, pip, git and certificates."""
    if release not in RELEASES:
        raise ImageError(
            f"there is no Debian release {release!r} here", field="image", remedy=f"one of {', '.join(RELEASES)}"
        )
    require_root("a Debian image")
    tool = require_tool("mmdebstrap")
    settings = machine_apt()
    with store.workspace() as workspace:
        root = workspace.directory("debian")
        command = [tool, "--variant=minbase", "--mode=root", "--format=directory", f"--include={','.join(PACKAGES)}"]
        command += [f"--aptopt={option}" for option in settings.options]
        command += ['--aptopt=APT::Install-Recommends "false"', release, str(root)]
        sources = settings.sources(release)
        if sources:
            listing = workspace.path / "sources.list"
            listing.write_text(sources)
            command.append(str(listing))
        progress(0, 2, f"bootstrapping Debian {release}")
        env = {"SOURCE_DATE_EPOCH": _EPOCH, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        await run_tool(command, what=f"mmdebstrap {release}", env=env, on_line=progress, step=0, total=2)
        progress(1, 2, "storing the layer")
        return await anyio.to_thread.run_sync(_store, store, workspace, root, release)


def _store(store: ImageStore, workspace: Workspace, root: Path, release: str) -> Image:
    status = root / "var/lib/dpkg/status"
    labels = {"debian.release": release, "debian.status": digest_bytes(status.read_bytes())}
    clean_system(root)
    layer = workspace.commit(root, deletions=False)
    return store.put(f"debian:{release}", [layer], env=ENV, labels=labels)


def clean_system(root: Path) -> None:
    """Remove from a root directory what differs from build to build and what belongs to no image."""
    for name in _EMPTIED:
        _empty(root / name)
    for name in _REMOVED:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name in ("etc/machine-id", "etc/resolv.conf"):
        path = root / name
        path.unlink(missing_ok=True)
        path.write_bytes(b"")
    (root / "etc/hostname").write_text("sandbox\n")
    (root / "etc/hosts").write_text("127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost\n")


def _empty(path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        return
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
