"""Archives and directories as tree streams: what a round trip keeps, and every kind of hostile archive."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.sandbox.contract import GuestProtocolError
from proctor.sandbox.native.records import HEADER, Record, TreeError, TreeLimits, encode, end_record
from proctor.sandbox.native.tree import directory_to_tree, open_archive, tar_to_tree, tree_to_directory, tree_to_tar

if TYPE_CHECKING:
    from collections.abc import Iterable


def archive(*members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> io.BytesIO:
    """A tar of members."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for member in members:
            info, data = member if isinstance(member, tuple) else (member, b"")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    stream.seek(0)
    return stream


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", **fields: object) -> tarfile.TarInfo:
    """One member without content."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def parse(chunks: Iterable[bytes]) -> list[tuple[Record, bytes]]:
    """Every record of a whole stream to a guest, with its content."""
    data, found, at = b"".join(chunks), list[tuple[Record, bytes]](), 0
    while True:
        kind, _, name, mode, uid, gid, nanoseconds, link, seconds, size = HEADER.unpack_from(data, at)
        at += HEADER.size
        path, target = data[at : at + name], data[at + name : at + name + link]
        at += name + link
        if chr(kind) == "E":
            assert (size, at) == (len(found), len(data))
            return found
        content = data[at : at + size] if chr(kind) == "F" else b""
        at += size + 4 if chr(kind) == "F" else 0
        found.append((Record(chr(kind), path, mode, uid, gid, seconds * 10**9 + nanoseconds, size, target), content))


def records(stream: io.BytesIO, **options: Any) -> list[Record]:
    """The records of an archive but for the metadata that is repeated at the end."""
    return [record for record, _ in parse(tar_to_tree(stream, **options)) if record.kind != "d"]


# --- round trips ----------------------------------------------------------------------------------------------

NAMES = st.binary(min_size=1, max_size=40).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
LONG = st.integers(100, 255).map(lambda length: b"n" * length)
TIMES = st.integers(0, 4_000_000_000_000_000_000)


@dataclass(frozen=True)
class Node:
    kind: str
    mode: int
    mtime_ns: int
    content: bytes


@st.composite
def trees(draw: st.DrawFn) -> dict[bytes, Node]:
    """A small tree: path → what is there."""
    tree: dict[bytes, Node] = {}
    folders = [b""]
    for _ in range(draw(st.integers(0, 8))):
        parent, name = draw(st.sampled_from(folders)), draw(NAMES | LONG)
        path = parent + b"/" + name if parent else name
        if path in tree:
            continue
        kind = draw(st.sampled_from("DFL"))
        content = b"" if kind == "D" else draw(NAMES | LONG) if kind == "L" else draw(st.binary(max_size=2000))
        tree[path] = Node(kind, 0o777 if kind == "L" else draw(st.integers(0o600, 0o777)) | 0o700, draw(TIMES), content)
        if kind == "D":
            folders.append(path)
    return tree


def stream_of(tree: dict[bytes, Node]) -> list[bytes]:
    """What a guest would send for `tree`."""
    chunks = [encode(Record("D", b"", 0o755))]
    for path, node in tree.items():
        size = len(node.content) if node.kind == "F" else 0
        target = node.content if node.kind == "L" else b""
        chunks.append(encode(Record(node.kind, path, node.mode, 0, 0, node.mtime_ns, size, target)))
        if node.kind == "F":
            chunks.append(node.content + bytes(4))
    return [*chunks, end_record(len(tree) + 1)]


def tree_of(chunks: Iterable[bytes]) -> dict[bytes, Node]:
    """The tree that a stream to a guest describes."""
    return {
        record.path: Node(record.kind, record.mode, record.mtime_ns, content or record.target)
        for record, content in parse(chunks)
        if record.kind != "d"
    }


@given(trees())
@settings(deadline=None)
def test_a_tree_survives_a_tar(tree: dict[bytes, Node]) -> None:
    out = io.BytesIO()
    assert tree_to_tar(stream_of(tree), out) == []
    out.seek(0)
    assert tree_of(tar_to_tree(out, links="any")) == tree


@given(trees())
@settings(deadline=None, max_examples=60)
def test_a_tree_survives_a_directory(tree: dict[bytes, Node]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert tree_to_directory(stream_of(tree), Path(folder, "t")) == []
        found = tree_of(directory_to_tree(Path(folder, "t")))
    assert {path: (node.kind, node.content, node.mtime_ns) for path, node in found.items()} == {
        path: (node.kind, node.content, node.mtime_ns) for path, node in tree.items()
    }


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_that_python_writes_is_read(form: int) -> None:
    long = "d" * 90 + "/" + "f" * 90
    found = records(
        archive(member("d" * 90, tarfile.DIRTYPE, mode=0o755), (member(long, mode=0o640), b"abc"), form=form)
    )
    assert [(record.kind, record.path, record.mode) for record in found if record.kind == "F"] == [
        ("F", long.encode(), 0o640)
    ]


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, lambda data: zstandard.compress(data)], ids=["tar", "gz", "zst"]
)
def test_compression_is_told_by_content(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "whatever"
    path.write_bytes(pack(archive((member("a"), b"abc")).getvalue()))
    with open_archive(path) as stream:
        assert b"abc" in b"".join(tar_to_tree(stream))


def test_metadata_of_directories_comes_last_deepest_first() -> None:
    members = [
        member("a", tarfile.DIRTYPE),
        member("a/b", tarfile.DIRTYPE),
        member("a/b/f"),
        member("c", tarfile.DIRTYPE),
    ]
    order = [(record.kind, record.path) for record, _ in parse(tar_to_tree(archive(*members)))]
    assert order[:4] == [("D", b"a"), ("D", b"a/b"), ("F", b"a/b/f"), ("D", b"c")]
    assert order[4] == ("d", b"a/b")
    assert sorted(order[5:]) == [("d", b"a"), ("d", b"c")]


# --- hostile archives -----------------------------------------------------------------------------------------

HOSTILE = {
    "absolute name": [member("/etc/passwd")],
    "dot-dot": [member("a/../../b")],
    "dot-dot at the end": [member("a/..", tarfile.DIRTYPE)],
    "empty name": [member("")],
    "overlong component": [member("x" * 256)],
    "absolute link": [member("a", tarfile.SYMTYPE, "/etc/passwd")],
    "link that leaves": [member("d/a", tarfile.SYMTYPE, "../../b")],
    "empty link": [member("a", tarfile.SYMTYPE, "")],
    "below a link": [member("a", tarfile.SYMTYPE, "b"), member("a/c")],
    "below a file": [member("a"), member("a/c")],
    "hard link outside": [member("a", tarfile.LNKTYPE, "../b")],
    "hard link to an absolute path": [member("a", tarfile.LNKTYPE, "/etc/passwd")],
    "hard link to nothing": [member("a", tarfile.LNKTYPE, "b")],
    "hard link to a link": [member("b", tarfile.SYMTYPE, "c"), member("a", tarfile.LNKTYPE, "b")],
    "hard link to itself": [member("a"), member("a", tarfile.LNKTYPE, "a")],
    "character device": [member("a", tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "block device": [member("a", tarfile.BLKTYPE, devmajor=8, devminor=0)],
    "fifo": [member("a", tarfile.FIFOTYPE)],
    "the same file twice": [member("a"), member("./a")],
    "a file where a directory was": [member("a/b"), member("a")],
    "a link where a directory was": [member("a", tarfile.DIRTYPE), member("a", tarfile.SYMTYPE, "b")],
    "a path by pax": [member("ok", pax_headers={"path": "../evil"})],
    "a link by pax": [member("ok", tarfile.SYMTYPE, "x", pax_headers={"linkpath": "/evil"})],
    "a sparse file by pax": [member("ok", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.name": "x"})],
    "an unknown type": [member("a", b"Z")],
    "a volume label": [member("a", b"V")],
    "the root as a file": [member(".")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_archive_is_refused_by_the_name_of_the_entry(members: list[tarfile.TarInfo]) -> None:
    with pytest.raises(TreeError) as caught:
        records(archive(*members))
    assert caught.value.field


def test_global_headers_may_not_rename_everything() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "evil"}) as tar:
        tar.addfile(member("a"))
    stream.seek(0)
    with pytest.raises(TreeError, match="global header"):
        records(stream)


def test_a_harmless_global_header_passes() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "0123abcd"}) as tar:
        tar.addfile(member("a"))
    stream.seek(0)
    assert [record.path for record in records(stream)] == [
        b"a",
    ]


def test_too_many_entries_and_too_many_bytes_are_refused() -> None:
    many = [member(f"f{number}") for number in range(11)]
    with pytest.raises(TreeError, match="more than 10 entries"):
        records(archive(*many), limits=TreeLimits(max_entries=10))
    with pytest.raises(TreeError, match="more than 100 bytes"):
        records(archive((member("a"), bytes(101))), limits=TreeLimits(max_bytes=100))


def test_a_promised_terabyte_is_refused_before_it_is_read() -> None:
    info = member("bomb")
    info.size = 1 << 40
    stream = io.BytesIO(info.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(TreeError, match="bytes of content"):
        records(stream)


def test_a_compressed_bomb_stops_at_the_cap(tmp_path: Path) -> None:
    info = member("bomb")
    info.size = 1 << 30
    path = tmp_path / "bomb.tar.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as out:
        out.write(info.tobuf(tarfile.GNU_FORMAT))
        out.write(bytes(1 << 20))
    with open_archive(path) as stream, pytest.raises(TreeError, match="bytes of content"):
        b"".join(tar_to_tree(stream, limits=TreeLimits(max_bytes=1 << 20)))


def test_a_flood_of_extension_headers_ends() -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 12
    block = header.tobuf(tarfile.USTAR_FORMAT) + b"12 abc=defg\n".ljust(512, b"\0")
    with pytest.raises(TreeError, match="entries"):
        records(io.BytesIO(block * 100), limits=TreeLimits(max_entries=5))


@pytest.mark.parametrize("size", [0, (1 << 20) + 1])
def test_an_extension_header_of_odd_size_is_refused(size: int) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, size
    with pytest.raises(TreeError, match="extension header"):
        records(io.BytesIO(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1024)))


def test_content_of_what_is_no_file_is_refused() -> None:
    info = member("d", tarfile.DIRTYPE)
    info.size = 5
    with pytest.raises(TreeError, match="content"):
        records(io.BytesIO(info.tobuf(tarfile.USTAR_FORMAT) + bytes(2048)))


def test_set_id_bits_and_owners_are_not_carried() -> None:
    (record,) = records(archive(member("a", mode=0o6755, uid=0, gid=7)))
    assert (record.mode, record.uid, record.gid) == (0o755, 0, 0)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:700], lambda data: data[:100] + b"9" + data[101:], lambda data: b"x" * 512]
)
def test_a_damaged_archive_is_refused(damage: Any) -> None:
    data = archive((member("a"), b"abc")).getvalue()
    with pytest.raises(TreeError):
        records(io.BytesIO(damage(data)))


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstandard.compress(data)], ids=["gz", "zst"])
def test_compression_that_is_cut_short_is_refused(tmp_path: Path, pack: Any) -> None:
    packed = pack(archive((member("a"), os.urandom(5000))).getvalue())
    (tmp_path / "a").write_bytes(packed[:2000])
    with pytest.raises(TreeError), open_archive(tmp_path / "a") as stream:
        parse(tar_to_tree(stream))


def test_garbage_in_compressed_data_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(archive((member("a"), os.urandom(5000))).getvalue())
    (tmp_path / "a").write_bytes(packed[:2000] + b"\xff" * 200 + packed[2200:])
    with pytest.raises(TreeError), open_archive(tmp_path / "a") as stream:
        parse(tar_to_tree(stream))


@given(st.binary(max_size=3000))
def test_noise_is_refused_with_a_typed_error(noise: bytes) -> None:
    with pytest.raises(TreeError):
        records(io.BytesIO(noise + b"x"))


@given(st.data())
@settings(deadline=None)
def test_a_mutated_archive_is_read_or_refused(data: st.DataObject) -> None:
    original = bytearray(
        archive(
            member("d", tarfile.DIRTYPE), (member("d/" + "n" * 120), b"abc" * 300), member("l", tarfile.SYMTYPE, "d")
        ).getvalue()
    )
    for _ in range(data.draw(st.integers(1, 5))):
        original[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    try:
        for record in records(io.BytesIO(bytes(original))):
            assert b".." not in record.path.split(b"/")
    except TreeError:
        pass


# --- streams from a guest that lies ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        Record("F", b"../x"),
        Record("D", b"/x"),
        Record("F", b"a//b"),
        Record("F", b"a\0b"),
        Record("d", b"x"),
        Record("H", b"x", target=b"y"),
        Record("X", b"x"),
        Record("L", b"x", target=b""),
        Record("L", b"x", target=b"y" * 5000),
    ],
)
def test_an_unsound_record_from_a_guest_is_a_broken_protocol(tmp_path: Path, record: Record) -> None:
    with pytest.raises(GuestProtocolError):
        tree_to_directory([encode(record), bytes(4), end_record(1)], tmp_path / "t")


def test_a_guest_cannot_write_through_a_link_it_sent(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    stream = [
        encode(Record("L", b"a", target=b"../outside")),
        encode(Record("F", b"a/f", 0o644)),
        bytes(4),
        end_record(2),
    ]
    with pytest.raises(TreeError):
        tree_to_directory(stream, tmp_path / "t")
    assert os.listdir(tmp_path / "outside") == []


def test_a_link_that_was_there_before_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a").symlink_to("../outside")
    with pytest.raises(TreeError):
        tree_to_directory([encode(Record("F", b"a/f", 0o644)), bytes(4), end_record(1)], tmp_path / "t")
    assert os.listdir(tmp_path / "outside") == []


def test_a_download_stops_at_its_cap(tmp_path: Path) -> None:
    stream = [encode(Record("F", b"f", 0o644, size=1 << 40))]
    with pytest.raises(TreeError, match="bytes of content"):
        tree_to_directory(stream, tmp_path / "t")


def test_a_stream_that_ends_early_is_not_a_tree(tmp_path: Path) -> None:
    with pytest.raises(GuestProtocolError):
        tree_to_directory([encode(Record("F", b"f", 0o644, size=10)), b"short"], tmp_path / "t")
    with pytest.raises(GuestProtocolError):
        tree_to_directory([encode(Record("D", b"d", 0o755)), end_record(2)], tmp_path / "t")


def test_what_cannot_be_read_or_written_here_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TreeError, match="Not a directory"):
        parse(directory_to_tree(tmp_path / "file"))
    with pytest.raises(TreeError, match="cannot be written here"):
        tree_to_directory(stream_of({}), tmp_path / "file/t")


@pytest.mark.sandbox
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "proctor-test", str(mount)], check=True)
    try:
        stream = [encode(Record("F", b"", 0o644, size=1 << 20)), bytes(1 << 20), bytes(4), end_record(1)]
        with pytest.raises(TreeError, match="No space left"):
            tree_to_directory(stream, mount / "file")
    finally:
        subprocess.run(["umount", str(mount)], check=True)
