"""Hostile archives, one each: refused by name, and nothing outside the target is ever touched."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.sandbox.contract import ImageError
from proctor.sandbox.images import archive, tree

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.sandbox

Member = tuple[tarfile.TarInfo, bytes]
Members = list[Member]


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: object) -> Member:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.size = len(data) if kind == tarfile.REGTYPE else 0
    for key, value in fields.items():
        setattr(member, key, value)
    return member, data


def directory(name: str, **fields: object) -> Member:
    return entry(name, kind=tarfile.DIRTYPE, mode=0o755, **fields)


def link(name: str, target: str) -> Member:
    return entry(name, kind=tarfile.SYMTYPE, linkname=target)


def hard(name: str, target: str) -> Member:
    return entry(name, kind=tarfile.LNKTYPE, linkname=target)


def tar(members: Members) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as file:
        for member, data in members:
            file.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def unpack(data: bytes, root: Path, *, deletions: bool = True, caps: archive.Caps | None = None) -> archive.Extracted:
    root.mkdir()
    with archive.decompressed(io.BytesIO(data), "x.tar", caps) as stream:
        return archive.extract(stream, root, what="x.tar", deletions=deletions, caps=caps)


REFUSED: dict[str, tuple[Members, str]] = {
    "traversal": ([entry("../escape", b"x")], "climbs"),
    "traversal in the middle": ([entry("a/../../escape", b"x")], "climbs"),
    "absolute": ([entry("/etc/escape", b"x")], "absolute"),
    "hard link out": ([hard("x", "../../etc/shadow")], "climbs"),
    "hard link to an absolute name": ([hard("x", "/etc/shadow")], "absolute"),
    "hard link to nothing": ([hard("x", "absent")], "hard link"),
    "hard link to a directory": ([directory("d"), hard("x", "d")], "hard link"),
    "file twice": ([entry("a", b"1"), entry("a", b"2")], "twice"),
    "link and file": ([link("a", "/etc/passwd"), entry("a", b"2")], "twice"),
    "directory over a file": ([entry("a", b"1"), directory("a")], "twice"),
    "file over an implied directory": ([entry("a/b", b"1"), entry("a", b"2")], "takes the place"),
    "below a file": ([entry("a", b"1"), entry("a/b", b"2")], "not a directory"),
    "link loop": ([link("a", "b"), link("b", "a"), entry("a/x", b"1")], "too many links"),
    "negative owner": ([entry("a", b"1", uid=-1)], "owned by"),
    "owner outside": ([entry("a", b"1", uid=1 << 20)], "owned by"),
    "too deep": ([entry("d/" * 300 + "x", b"1")], "deep"),
    "long name": ([entry("n" * 300, b"1")], "too long"),
    "deletion with content": ([entry(".wh.a", b"1")], "not an empty file"),
    "deletion of nothing": ([entry(".wh.", b"")], "without a proper name"),
    "deletion of dot-dot": ([entry(".wh...", b"")], "without a proper name"),
    "deletion of a mark": ([entry(".wh..wh.plnk", b"")], "without a proper name"),
    "deletion as directory": ([directory(".wh.a")], "not an empty file"),
    "unknown kind": ([entry("a", kind=b"V")], "kind"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    members, words = REFUSED[case]
    with pytest.raises(ImageError, match=words):
        unpack(tar(members), tmp_path / "root")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_base_layer_with_deletions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="deletes"):
        unpack(tar([entry(".wh.a")]), tmp_path / "root", deletions=False)


def test_links_are_kept_and_never_followed_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    unpack(
        tar([link("abs", str(outside)), entry("abs/a", b"1"), link("rel", "../../../.."), entry("rel/b", b"2")]), root
    )
    assert list(outside.iterdir()) == []
    assert os.readlink(root / "abs") == str(outside)
    assert (root / str(outside)[1:] / "a").read_bytes() == b"1"
    assert (root / "b").read_bytes() == b"2"


def test_a_name_through_a_link_goes_where_the_kernel_would_go(tmp_path: Path) -> None:
    root = tmp_path / "root"
    unpack(tar([directory("usr"), directory("usr/bin"), link("bin", "usr/bin"), entry("bin/tool", b"1")]), root)
    assert (root / "usr/bin/tool").read_bytes() == b"1"
    assert (root / "bin").is_symlink()


def test_devices_are_left_out_and_counted(tmp_path: Path) -> None:
    members = [
        entry("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
        entry("sda", kind=tarfile.BLKTYPE, devmajor=8, devminor=0),
        entry("whiteout", kind=tarfile.CHRTYPE, devmajor=0, devminor=0),
    ]
    facts = unpack(tar(members), tmp_path / "root")
    assert facts.devices == 3
    assert list((tmp_path / "root").iterdir()) == []


def test_attributes_are_left_out_and_counted(tmp_path: Path) -> None:
    headers = {"SCHILY.xattr.security.capability": "x", "SCHILY.xattr.trusted.overlay.opaque": "y"}
    facts = unpack(tar([directory("d", pax_headers=headers), entry("f", b"", pax_headers=headers)]), tmp_path / "root")
    assert facts.attributes == 4
    assert os.listxattr(tmp_path / "root/d") == os.listxattr(tmp_path / "root/f") == []


def test_deletions_become_overlay_marks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    unpack(
        tar([directory("d"), entry("d/.wh.gone"), directory("o"), entry("o/.wh..wh..opq"), entry("o/new", b"1")]), root
    )
    info = (root / "d/gone").lstat()
    assert stat.S_ISCHR(info.st_mode)
    assert info.st_rdev == 0
    assert tree.is_opaque(os.fsencode(root / "o"))
    assert (root / "o/new").read_bytes() == b"1"


def test_a_directory_that_replaces_one_below_is_opaque(tmp_path: Path) -> None:
    root = tmp_path / "root"
    unpack(tar([entry(".wh.d"), directory("d"), entry("d/new", b"1")]), root)
    assert tree.is_opaque(os.fsencode(root / "d"))


def test_set_id_modes_owners_times_and_hard_links_survive(tmp_path: Path) -> None:
    root = tmp_path / "root"
    unpack(tar([entry("su", b"x", mode=0o4755, uid=0, gid=42, mtime=1234), hard("also", "su")]), root)
    info = (root / "su").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_gid, int(info.st_mtime), info.st_nlink) == (0o4755, 42, 1234, 2)


def test_pax_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9\n")
    unpack(tar([entry(name, b"x")]), tmp_path / "root")
    assert os.listdir(os.fsencode(tmp_path / "root")) == [b"caf\xe9\n"]


def test_a_pax_header_cannot_make_a_name_absolute(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="absolute"):
        unpack(tar([entry("fine", b"x", pax_headers={"path": "/etc/escape"})]), tmp_path / "root")


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
}


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_compression_is_told_by_content(kind: str, tmp_path: Path) -> None:
    unpack(COMPRESSIONS[kind](tar([entry("a", b"1" * 3_000_000)])), tmp_path / "root")
    assert (tmp_path / "root/a").stat().st_size == 3_000_000


@pytest.mark.parametrize("kind", [kind for kind in COMPRESSIONS if kind != "plain"])
def test_many_streams_in_a_row_are_one(kind: str, tmp_path: Path) -> None:
    data = tar([entry("a", os.urandom(300_000))])
    unpack(COMPRESSIONS[kind](data[:100_000]) + COMPRESSIONS[kind](data[100_000:]), tmp_path / "root")
    assert (tmp_path / "root/a").stat().st_size == 300_000


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_garbage_after_the_first_bytes_is_damaged(kind: str, tmp_path: Path) -> None:
    data = COMPRESSIONS[kind](tar([entry("a", b"1")]))
    with pytest.raises(ImageError, match="damaged"):
        unpack(data[:6] + b"garbage" * 1000, tmp_path / "root")


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_cut_off_archive_is_damaged(kind: str, tmp_path: Path) -> None:
    data = COMPRESSIONS[kind](tar([entry("a", os.urandom(200_000))]))
    with pytest.raises(ImageError, match="damaged"):
        unpack(data[: len(data) // 2], tmp_path / "root")


def test_garbage_is_not_an_archive(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="not an archive"):
        unpack(b"hello" * 1000, tmp_path / "root")


SMALL = archive.Caps(total_bytes=1 << 20, entries=100, depth=20, ratio=20, free_bytes=1 << 18)


def test_a_bomb_of_bytes(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="unpacks to more than"):
        unpack(gzip.compress(tar([entry("zeros", bytes(1 << 22))])), tmp_path / "root", caps=SMALL)


def test_a_bomb_of_ratio(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="times its size"):
        unpack(gzip.compress(tar([entry("zeros", bytes(900_000))])), tmp_path / "root", caps=SMALL)


def test_a_bomb_of_entries(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="entries"):
        unpack(tar([entry(f"f{number}") for number in range(101)]), tmp_path / "root", caps=SMALL)


def test_a_sparse_terabyte(tmp_path: Path) -> None:
    member, _ = entry("huge")
    member.size = 1 << 40
    data = member.tobuf(format=tarfile.PAX_FORMAT) + bytes(1024)
    with pytest.raises(ImageError, match=r"more than|damaged"):
        unpack(data, tmp_path / "root", caps=SMALL)


SAMPLE = tar(
    [
        directory("d", uid=1, mtime=5),
        entry("d/file", b"content" * 100, mode=0o4755, pax_headers={"comment": "x", "mtime": "12.5"}),
        link("d/link", "../../x"),
        hard("d/hard", "d/file"),
        entry("d/.wh.gone"),
        entry("n" * 120, b"long"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4))
def test_any_damage_is_an_image_error_or_harmless(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(SAMPLE)
    for place, new in changes:
        data[place : place + len(new)] = new
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(ImageError):
            unpack(fix_checksums(bytes(data)), Path(folder) / "root", caps=SMALL)
        assert os.listdir(folder) == ["root"]


def fix_checksums(data: bytes) -> bytes:
    """Make the checksum of each header right again, or every change would be found by it alone."""
    blocks = [bytearray(data[start : start + 512]) for start in range(0, len(data), 512)]
    for block in blocks:
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(blocks)
