"""The `host` image: a read-only view of this machine's /usr, and a skeleton of everything around it.

Nothing is downloaded and nothing private comes along: no homes, no keys, no passwords, and of /etc only the list below.
/usr/local and /usr/src are covered by an empty directory: they hold what was installed by hand.
The digest covers the skeleton and the machine's identity (packages, release, library cache).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from proctor.common import digest_json
from proctor.common.digests import digest_file
from proctor.sandbox.contract import Image, ImageError
from proctor.sandbox.images.manifest import MountRecord
from proctor.sandbox.images.store import EMPTY, ImageStore, Workspace
from proctor.sandbox.images.tools import require_root

REF = "host"
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HIDDEN = ("/usr/local", "/usr/src")
_DIRECTORIES: tuple[tuple[str, int], ...] = (
    ("app", 0o755),
    ("dev", 0o755),
    ("etc/alternatives", 0o755),
    ("etc/ssl/certs", 0o755),
    ("home/user", 0o755),
    ("logs/agent", 0o777),
    ("logs/artifacts", 0o777),
    ("logs/verifier", 0o777),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run/lock", 0o1777),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
)
# Public files only, by name. /etc/environment, /etc/gitconfig, /etc/pip.conf and their like may hold credentials.
_COPIED = (
    "bash.bashrc",
    "debian_version",
    "inputrc",
    "ld.so.cache",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "mime.types",
    "os-release",
    "profile",
    "protocols",
    "rpc",
    "services",
    "shells",
    "ssl/openssl.cnf",
)
_WRITTEN: dict[str, str] = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
        "bin:x:2:2:bin:/bin:/usr/sbin/nologin\n"
        "user:x:1000:1000:user:/home/user:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": "root:x:0:\ndaemon:x:1:\nbin:x:2:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost\n",
    "hostname": "sandbox\n",
    "host.conf": "multi on\n",
    "nsswitch.conf": (
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n"
        "protocols: files\nservices: files\nrpc: files\n"
    ),
    "resolv.conf": "",
    "machine-id": "",
    "fstab": "",
    "timezone": "Etc/UTC\n",
}
_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}


def host_identity(root: Path = Path("/")) -> str:
    """Digest of what decides the content of /usr: installed packages, release and library cache."""
    parts = {}
    for name in ("var/lib/dpkg/status", "etc/os-release", "etc/ld.so.cache"):
        path = root / name
        parts[name] = digest_file(path) if path.is_file() else None
    return digest_json(parts)


def host_image(store: ImageStore, root: Path = Path("/")) -> Image:
    """The `host` image of this machine, made anew when the machine has changed."""
    _check_merged(root)
    identity = host_identity(root)
    digest = store.find_digest(REF)
    if digest is not None:
        image = store.resolve(digest)
        if image.labels.get("host.identity") == identity and image.labels.get("host.skeleton") == _skeleton_version():
            return replace(image, ref=REF)
    require_root("the host image")
    with store.workspace() as workspace:
        layer = workspace.commit(_skeleton(workspace, root), deletions=False)
        mounts = [MountRecord(source=str(root / "usr"), target="/usr")]
        mounts += [MountRecord(source=EMPTY, target=path) for path in _HIDDEN if (root / path[1:]).is_dir()]
        labels = {"host.identity": identity, "host.skeleton": _skeleton_version()}
        return store.put(REF, [layer], env=_ENV, mounts=mounts, labels=labels)


def _skeleton_version() -> str:
    """Changes when this module's lists do."""
    return digest_json([_DIRECTORIES, _COPIED, _WRITTEN, _MERGED, _HIDDEN, _ENV])


def _check_merged(root: Path) -> None:
    """/bin, /sbin and /lib must be links into /usr (all Debian and Ubuntu releases since 2021)."""
    for name in ("bin", "sbin", "lib"):
        path = root / name
        if not path.is_symlink() or os.readlink(path).lstrip("/") != f"usr/{name}":
            raise ImageError(
                f"the host image needs a merged /usr, and {path} is not a link to usr/{name}",
                field="image",
                remedy="proctor image build debian:bookworm",
            )


def _skeleton(workspace: Workspace, root: Path) -> Path:
    target = workspace.directory("host")
    for name, mode in _DIRECTORIES:
        for parent in reversed(Path(name).parents[:-1]):
            (target / parent).mkdir(mode=0o755, exist_ok=True)
            (target / parent).chmod(0o755)
        (target / name).mkdir(exist_ok=True)
        (target / name).chmod(mode)
    os.chown(target / "home/user", 1000, 1000)
    for name in _MERGED:
        if (root / name).is_symlink():
            (target / name).symlink_to(f"usr/{name}")
    (target / "var/run").symlink_to("/run")
    (target / "var/lock").symlink_to("/run/lock")
    for name, text in _WRITTEN.items():
        _write(target / "etc" / name, text.encode())
    for name in _COPIED:
        _copy_public(root / "etc" / name, target / "etc" / name)
    _copy_public(root / "etc/ssl/certs/ca-certificates.crt", target / "etc/ssl/certs/ca-certificates.crt")
    (target / "etc/ssl/cert.pem").symlink_to("certs/ca-certificates.crt")
    (target / "etc/mtab").symlink_to("/proc/self/mounts")
    _copy_alternatives(root, target)
    return target


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o644)


def _copy_public(source: Path, target: Path) -> None:
    """Copy a regular file that everyone may read, or a link that points into /usr; nothing else."""
    if source.is_symlink():
        aim = os.path.normpath(os.path.join("/etc", os.readlink(source)))
        if aim.startswith("/usr/"):
            target.symlink_to(aim)
        return
    if source.is_file() and source.stat().st_mode & 0o004:
        shutil.copyfile(source, target)
        target.chmod(0o644)


def _copy_alternatives(root: Path, target: Path) -> None:
    """/etc/alternatives, as far as it points at packaged files that can be seen inside."""
    for path in sorted((root / "etc/alternatives").glob("*")):
        if not path.is_symlink():
            continue
        aim = os.readlink(path)
        if aim.startswith("/usr/") and not aim.startswith(tuple(f"{item}/" for item in _HIDDEN)):
            (target / "etc/alternatives" / path.name).symlink_to(aim)
