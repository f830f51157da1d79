"""The host image: enough to work in, nothing private, made anew when the machine changes."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from proctor import sandbox
from proctor.sandbox.contract import ImageError, SandboxSpec
from proctor.sandbox.images import ImageStore
from proctor.sandbox.images.host import host_identity, host_image

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sandbox, pytest.mark.anyio]

MERGED = os.path.islink("/bin")
needs_merged = pytest.mark.skipif(not MERGED, reason="this machine's /usr is not merged")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A small pretended machine, with secrets where machines have them."""
    root = tmp_path / "machine"
    for name in ("usr/bin", "usr/sbin", "usr/lib", "usr/local/bin", "usr/share/zoneinfo/Etc", "etc/ssl/certs"):
        (root / name).mkdir(parents=True)
    for name in ("etc/ssl/private", "etc/ssh", "etc/alternatives", "root/.ssh", "home/me", "var/lib/dpkg"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib"):
        (root / name).symlink_to(f"usr/{name}")
    secret = "SECRET-0f3a"
    for name in (
        "etc/shadow", "etc/gshadow", "etc/ssh/ssh_host_rsa_key", "etc/ssl/private/key.pem", "etc/environment",
        "etc/pip.conf", "etc/gitconfig", "etc/passwd", "etc/hosts", "etc/resolv.conf", "etc/machine-id", "etc/fstab",
        "etc/hostname", "root/.ssh/id_rsa", "home/me/notes", "usr/local/bin/tool",
    ):  # fmt: skip
        (root / name).write_text(secret)
    (root / "etc/profile").write_text(secret)
    (root / "etc/profile").chmod(0o600)
    (root / "etc/services").write_text("ssh 22/tcp\n")
    (root / "etc/inputrc").symlink_to("/home/me/notes")
    (root / "etc/localtime").symlink_to("../usr/share/zoneinfo/Etc/UTC")
    (root / "etc/alternatives/awk").symlink_to("/usr/bin/mawk")
    (root / "etc/alternatives/java").symlink_to("/usr/local/bin/java")
    (root / "etc/alternatives/odd").symlink_to("/home/me/odd")
    (root / "var/lib/dpkg/status").write_text("Package: x\n")
    return root


def content(root: Path) -> str:
    found = []
    for path in root.rglob("*"):
        if path.is_symlink():
            found.append(os.readlink(path))
        elif path.is_file():
            found.append(path.read_text(errors="replace"))
    return "\n".join(found)


def test_nothing_private_comes_along(store: ImageStore, machine: Path) -> None:
    layer = host_image(store, machine).layers[0].path
    text = content(layer)
    assert "SECRET" not in text
    assert "/home/me" not in text
    assert "/usr/local/bin/java" not in text
    assert (layer / "etc/services").read_text() == "ssh 22/tcp\n"
    assert os.readlink(layer / "etc/localtime") == "/usr/share/zoneinfo/Etc/UTC"
    assert sorted(path.name for path in (layer / "etc/alternatives").iterdir()) == ["awk"]


def test_usr_is_mounted_and_its_local_part_covered(store: ImageStore, machine: Path) -> None:
    mounts = host_image(store, machine).mounts
    assert [(mount.source, mount.target) for mount in mounts] == [
        (machine / "usr", "/usr"),
        (store.root / "empty", "/usr/local"),
    ]
    assert list((store.root / "empty").iterdir()) == []


def test_it_is_the_same_until_the_machine_changes(store: ImageStore, machine: Path) -> None:
    first = host_image(store, machine)
    assert host_image(store, machine).digest == first.digest
    (machine / "var/lib/dpkg/status").write_text("Package: x\nPackage: y\n")
    assert host_image(store, machine).digest != first.digest
    assert host_identity(machine) != first.labels["host.identity"]


def test_a_machine_without_merged_usr_is_refused(store: ImageStore, machine: Path) -> None:
    (machine / "bin").unlink()
    (machine / "bin").mkdir()
    with pytest.raises(ImageError, match="merged /usr"):
        host_image(store, machine)


@needs_merged
def test_no_file_of_this_machine_s_image_is_secret(store: ImageStore) -> None:
    layer = store.resolve("host").layers[0].path
    for name in (
        "etc/shadow",
        "etc/gshadow",
        "etc/sudoers",
        "etc/ssh",
        "etc/ssl/private",
        "etc/apt",
        "etc/environment",
    ):
        assert not os.path.lexists(layer / name)
    assert [list((layer / name).iterdir()) for name in ("root", "home/user", "var/log", "tmp", "run/lock")] == [[]] * 5
    setid = [path for path in layer.rglob("*") if path.is_file() and path.lstat().st_mode & 0o6000]
    assert setid == []
    assert stat.S_IMODE((layer / "tmp").stat().st_mode) == 0o1777


@needs_merged
async def test_common_tools_run_in_it_and_nothing_of_the_machine_shows(store: ImageStore) -> None:
    image = store.resolve("host")
    async with sandbox.create(SandboxSpec(image=image)) as box:
        result = await box.exec("python3 -c 'import ssl, json, sqlite3; print(6*7)' && ls /usr/local | wc -l && id -un")
        assert result.text.split() == ["42", "0", "root"], result.error_text
        hidden = await box.exec("cat /etc/shadow /root/.ssh/* /etc/machine-id /etc/resolv.conf; ls /home /root")
        assert hidden.text.split() == ["/home:", "user", "/root:"]
        assert (await box.exec("touch /usr/bin/x")).exit_code != 0
        assert (await box.exec("echo hi > /tmp/x && cat /tmp/x", user="user")).text == "hi\n"


@needs_merged
@pytest.mark.skipif(shutil.which("awk") is None, reason="there is no awk on this machine")
async def test_awk_and_other_alternatives_work(store: ImageStore) -> None:
    async with sandbox.create(SandboxSpec(image=store.resolve("host"))) as box:
        assert (await box.exec("awk 'BEGIN{print 42}'")).text == "42\n"
