"""Layers read as overlayfs would read them: diff and export, over plain directories with real whiteouts."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.sandbox import layers
from proctor.sandbox._walk import Walk
from proctor.sandbox.contract import DiffEntry, Layer, SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.sandbox  # whiteouts and trusted.* attributes need root


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    root = tmp_path / "lower"
    (root / "etc/conf.d").mkdir(parents=True)
    (root / "etc/passwd").write_text("root\n")
    (root / "etc/conf.d/a").write_text("a")
    (root / "etc/conf.d/b").write_text("b")
    (root / "link").symlink_to("etc")
    return root


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "upper").mkdir()
    descriptor = os.open(tmp_path / "upper", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def place(root: int) -> Path:
    """A path for the open directory, so that tests can fill it."""
    return Path(f"/proc/self/fd/{root}")


def copy_up(upper: int, lower: Path, path: str) -> Path:
    """Copy one file up as overlayfs does: parents, mode, owner and times are kept."""
    source, target = lower / path, place(upper) / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    info = source.stat()
    target.chmod(info.st_mode & 0o7777)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
    return target


def brief(entries: list[DiffEntry]) -> list[tuple[str, str]]:
    return [(entry.path, entry.change) for entry in entries]


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name: member for member in tar}


def test_an_empty_upper_changes_nothing(lower: Path, upper: int) -> None:
    assert layers.diff(upper, [Layer(lower)]) == []


def test_added_modified_and_deleted_are_told_apart(lower: Path, upper: int) -> None:
    root = place(upper)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root\ncandidate\n")
    (root / "etc/new").write_text("x")
    os.mknod(root / "link", 0o020000, 0)
    assert brief(layers.diff(upper, [Layer(lower)])) == [
        ("/etc/new", "added"),
        ("/etc/passwd", "modified"),
        ("/link", "deleted"),
    ]


def test_a_file_copied_up_and_left_alone_is_no_change(lower: Path, upper: int) -> None:
    copy_up(upper, lower, "etc/passwd")
    assert layers.diff(upper, [Layer(lower)]) == []


def test_a_change_that_keeps_size_and_time_is_seen(lower: Path, upper: int) -> None:
    target = copy_up(upper, lower, "etc/passwd")
    info = target.stat()
    target.write_text("toor\n")
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert brief(layers.diff(upper, [Layer(lower)])) == [("/etc/passwd", "modified")]


def test_a_change_of_mode_alone_is_a_modification(lower: Path, upper: int) -> None:
    copy_up(upper, lower, "etc/passwd").chmod(0o600)
    assert brief(layers.diff(upper, [Layer(lower)])) == [("/etc/passwd", "modified")]


def test_an_opaque_directory_deletes_what_it_does_not_have(lower: Path, upper: int) -> None:
    folder = place(upper) / "etc/conf.d"
    folder.mkdir(parents=True)
    (folder / "a").write_text("new a")
    os.setxattr(folder, "trusted.overlay.opaque", b"y")
    assert brief(layers.diff(upper, [Layer(lower)])) == [("/etc/conf.d/b", "deleted"), ("/etc/conf.d/a", "modified")]


def test_an_opaque_mark_holds_for_the_directories_inside_it(lower: Path, upper: int) -> None:
    (place(upper) / "etc/conf.d").mkdir(parents=True)
    os.setxattr(place(upper) / "etc", "trusted.overlay.opaque", b"y")
    assert brief(layers.diff(upper, [Layer(lower)])) == [
        ("/etc/passwd", "deleted"),
        ("/etc/conf.d/a", "deleted"),
        ("/etc/conf.d/b", "deleted"),
    ]


def test_a_directory_that_became_a_file_is_modified(lower: Path, upper: int) -> None:
    (place(upper) / "etc").write_text("not a directory any more")
    assert brief(layers.diff(upper, [Layer(lower)])) == [("/etc", "modified")]


def test_a_whiteout_in_a_middle_layer_hides_the_bottom(lower: Path, upper: int, tmp_path: Path) -> None:
    middle = tmp_path / "middle"
    (middle / "etc").mkdir(parents=True)
    os.mknod(middle / "etc/passwd", 0o020000, 0)
    root = place(upper)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("again\n")
    assert brief(layers.diff(upper, [Layer(lower), Layer(middle)])) == [("/etc/passwd", "added")]


def test_a_deletion_of_what_is_already_gone_is_no_change(lower: Path, upper: int) -> None:
    os.mknod(place(upper) / "never-there", 0o020000, 0)
    assert layers.diff(upper, [Layer(lower)]) == []


def test_links_are_never_followed(lower: Path, upper: int, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    (place(upper) / "door").symlink_to(tmp_path / "outside")
    assert brief(layers.diff(upper, [Layer(lower)])) == [("/door", "added")]
    layers.export(upper, tmp_path / "out.tar.zst")
    assert set(members(tmp_path / "out.tar.zst")) == {"door"}


def test_a_tree_deeper_than_the_descriptor_limit_is_walked(upper: int) -> None:
    here = os.dup(upper)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    before = len(os.listdir("/proc/self/fd"))
    with Walk(upper) as walk:
        assert sum(1 for _ in walk) == 3000
    subprocess.run(["rm", "-rf", "d"], cwd=place(upper), check=True)
    assert len(os.listdir("/proc/self/fd")) == before


def deep(root: int, levels: int, content: bytes) -> None:
    """A file so far down that no path can say it."""
    here = os.dup(root)
    for _ in range(levels):
        os.mkdir("directory", dir_fd=here)
        below = os.open("directory", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(file, content)
    os.close(file)
    os.close(here)


def test_layers_deeper_than_a_path_can_say_are_compared(upper: int, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    below = os.open(tmp_path / "deep", os.O_RDONLY)
    deep(below, 1000, b"before")
    deep(upper, 1000, b"after it")
    (entry,) = layers.diff(upper, [Layer(tmp_path / "deep")])
    assert (entry.change, entry.path.count("/")) == ("modified", 1001)
    for place_of in (upper, below):
        subprocess.run(["rm", "-rf", "directory"], cwd=place(place_of), check=True)
    os.close(below)


def test_terabytes_of_nothing_are_not_read_to_be_compared(upper: int, tmp_path: Path) -> None:
    for folder in (place(upper), tmp_path):
        with open(folder / "giant", "wb") as file:
            file.truncate(1 << 40)
        os.utime(folder / "giant", (0, 0))
    assert brief(layers.diff(upper, [Layer(tmp_path)])) == [("/giant", "modified")]


def test_a_directory_moved_during_the_walk_is_an_error_not_a_detour(upper: int) -> None:
    root = place(upper)
    path = root
    for index in range(80):
        path = path / f"d{index}"
        path.mkdir()
    with Walk(upper) as walk:
        steps = iter(walk)
        while next(steps).name != "d79":
            pass
        os.rename(root / "d0/d1", root / "elsewhere")
        with pytest.raises(SandboxError, match="moved"):
            list(steps)


def test_export_writes_whiteouts_opaque_marks_and_kinds(lower: Path, upper: int, tmp_path: Path) -> None:
    root = place(upper)
    (root / "etc/conf.d").mkdir(parents=True)
    os.setxattr(root / "etc/conf.d", "trusted.overlay.opaque", b"y")
    os.mknod(root / "etc/passwd", 0o020000, 0)
    (root / "tool").write_text("#!/bin/sh\n")
    (root / "tool").chmod(0o4755)
    os.link(root / "tool", root / "twin")
    os.mkfifo(root / "pipe")
    layers.export(upper, tmp_path / "diff.tar.zst")
    found = members(tmp_path / "diff.tar.zst")
    assert set(found) == {"etc", "etc/conf.d", "etc/conf.d/.wh..wh..opq", "etc/.wh.passwd", "tool", "twin", "pipe"}
    assert found["tool"].mode == 0o4755
    assert (found["twin"].type, found["twin"].linkname) == (tarfile.LNKTYPE, "tool")
    assert found["pipe"].isfifo()


def test_a_name_made_to_look_like_a_whiteout_is_not_one_in_the_export(upper: int, tmp_path: Path) -> None:
    (place(upper) / ".wh.shadow").write_text("trick")
    layers.export(upper, tmp_path / "diff.tar.zst")
    found = members(tmp_path / "diff.tar.zst")
    assert list(found) == ["%2ewh.shadow"]
    assert found["%2ewh.shadow"].pax_headers["PROCTOR.path"] == ".wh.shadow"


def test_a_sparse_giant_costs_nothing(upper: int, tmp_path: Path) -> None:
    with open(place(upper) / "giant", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"needle")
    layers.export(upper, tmp_path / "diff.tar.zst")
    assert (tmp_path / "diff.tar.zst").stat().st_size < 10_000
    assert members(tmp_path / "diff.tar.zst")["giant"].size == 1 << 40


def test_names_that_are_not_text_survive(upper: int, tmp_path: Path) -> None:
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b"a" * 255):
        (place(upper) / os.fsdecode(name)).write_bytes(name)
    layers.export(upper, tmp_path / "diff.tar.zst")
    found = {os.fsencode(name) for name in members(tmp_path / "diff.tar.zst")}
    assert found == {b"\xff\xfe", b"new\nline", b"-rf", b"a" * 255}
    assert len(layers.diff(upper, [])) == 4


def test_an_export_that_fails_leaves_no_part(upper: int, tmp_path: Path) -> None:
    with pytest.raises(SandboxError):
        layers.export(upper, Path("/proc/nowhere/diff.tar.zst"))
    assert not list(tmp_path.glob(".diff*"))


_NAMES = st.sampled_from(["a", "b", "c"])
_TREES = st.recursive(
    st.binary(max_size=3), lambda children: st.dictionaries(_NAMES, children, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def make(root: Path, tree: object) -> None:
    assert isinstance(tree, dict)
    root.mkdir()
    for name, value in tree.items():
        if isinstance(value, dict):
            make(root / name, value)
        else:
            (root / name).write_bytes(value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bottom=_TREES, middle=_TREES)
def test_a_layer_added_to_itself_is_no_change(
    bottom: object, middle: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stack")
    make(folder / "bottom", bottom)
    make(folder / "middle", middle)
    descriptor = os.open(folder / "middle", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert layers.diff(descriptor, [Layer(folder / "bottom"), Layer(folder / "middle")]) == []
    finally:
        os.close(descriptor)
