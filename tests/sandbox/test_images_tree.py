"""What a layer is: the same content has the same digest, any difference another, and nothing harmful stays in it."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.sandbox.contract import ImageError
from proctor.sandbox.images import tree

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.sandbox

NAMES = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)
FILES = st.dictionaries(
    NAMES, st.tuples(st.binary(max_size=50), st.sampled_from([0o644, 0o755, 0o4755, 0o600])), max_size=6
)


def write_tree(root: Path, files: dict[str, tuple[bytes, int]]) -> Path:
    root.mkdir()
    for name, (data, mode) in files.items():
        (root / name).write_bytes(data)
        (root / name).chmod(mode)
    return root


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=FILES, other=FILES)
def test_equal_content_and_only_that_gives_an_equal_digest(
    files: dict[str, tuple[bytes, int]], other: dict[str, tuple[bytes, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("trees")
    first = tree.scan(write_tree(base / "a", files))
    again = tree.scan(write_tree(base / "b", dict(reversed(files.items()))))
    different = tree.scan(write_tree(base / "c", other))
    assert first == again
    assert (first.digest == different.digest) == (files == other)


def change_mode(root: Path) -> None:
    (root / "file").chmod(0o600)


def change_owner(root: Path) -> None:
    os.chown(root / "file", 1, 0)


def change_target(root: Path) -> None:
    (root / "link").unlink()
    (root / "link").symlink_to("elsewhere")


def link_hard(root: Path) -> None:
    (root / "copy").unlink()
    os.link(root / "file", root / "copy")


def delete_below(root: Path) -> None:
    (root / "copy").unlink()
    os.mknod(root / "copy", stat.S_IFCHR, 0)


def make_opaque(root: Path) -> None:
    os.setxattr(root / "dir", tree.OPAQUE, b"y")


@pytest.mark.parametrize(
    "change", [change_mode, change_owner, change_target, link_hard, delete_below, make_opaque], ids=lambda f: f.__name__
)
def test_every_property_that_a_sandbox_can_see_is_part_of_the_digest(tmp_path: Path, change: object) -> None:
    root = write_tree(tmp_path / "t", {"file": (b"same", 0o644), "copy": (b"same", 0o644)})
    (root / "link").symlink_to("file")
    (root / "dir").mkdir()
    before = tree.scan(root)
    change(root)  # type: ignore[operator]
    assert tree.scan(root).digest != before.digest


def test_times_are_not_part_of_the_digest(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "t", {"file": (b"x", 0o644)})
    before = tree.scan(root)
    os.utime(root / "file", (1, 1))
    assert tree.scan(root) == before


def test_devices_and_sockets_are_removed_and_counted(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "t", {"file": (b"x", 0o644)})
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "disk", stat.S_IFBLK | 0o600, os.makedev(8, 0))
    os.mknod(root / "socket", stat.S_IFSOCK | 0o600)
    assert tree.normalise(root) == 3
    assert sorted(path.name for path in root.iterdir()) == ["file"]


def test_a_base_layer_cannot_delete(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "t", {})
    (root / "dir").mkdir()
    os.mknod(root / "gone", stat.S_IFCHR, 0)
    os.setxattr(root / "dir", tree.OPAQUE, b"y")
    tree.normalise(root, deletions=False)
    assert not os.path.lexists(root / "gone")
    assert os.listxattr(root / "dir") == []


def test_marks_of_unprivileged_overlays_become_the_store_s_own(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "t", {})
    (root / "dir").mkdir()
    os.setxattr(root / "dir", "user.overlay.opaque", b"y")
    tree.normalise(root)
    assert os.listxattr(root / "dir") == [tree.OPAQUE]


def test_file_capabilities_and_user_attributes_are_stripped(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "t", {"ping": (b"x", 0o755)})
    # cap_net_raw+ep, revision 2 (linux/capability.h, struct vfs_cap_data)
    os.setxattr(root / "ping", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    os.setxattr(root / "ping", "user.note", b"x")
    tree.normalise(root)
    assert os.listxattr(root / "ping") == []


@pytest.mark.parametrize("mark", ["redirect", "metacopy"])
def test_marks_that_point_into_another_layer_are_refused(tmp_path: Path, mark: str) -> None:
    root = write_tree(tmp_path / "t", {})
    (root / "dir").mkdir()
    os.setxattr(root / "dir", f"trusted.overlay.{mark}", b"/etc")
    with pytest.raises(ImageError, match=mark):
        tree.normalise(root)


def test_ids_are_shifted_and_set_id_bits_survive_the_shift(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "t", {"su": (b"x", 0o755)})
    for path in (root, root / "su"):
        os.chown(path, 100_000, 100_005)
    (root / "su").chmod(0o4755)
    tree.normalise(root, id_base=100_000)
    info = (root / "su").stat()
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (0, 5, 0o4755)


def test_set_id_bits_of_a_candidate_s_files_are_stripped(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "t", {"su": (b"x", 0o6755)})
    tree.normalise(root, strip_setid=True)
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755


@pytest.mark.parametrize("owner", [99_999, 165_536])
def test_an_owner_outside_the_sandbox_s_range_is_refused(tmp_path: Path, owner: int) -> None:
    root = write_tree(tmp_path / "t", {"file": (b"x", 0o644)})
    os.chown(root, 100_000, 100_000)
    os.chown(root / "file", owner, 100_000)
    with pytest.raises(ImageError, match="outside"):
        tree.normalise(root, id_base=100_000)
