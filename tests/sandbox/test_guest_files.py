"""File operations of a real guest on a hostile file system, and trees through it."""

from __future__ import annotations

import errno
import io
import os
import socket
import stat
import subprocess
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import anyio
import pytest

from proctor.sandbox.contract import FileError
from proctor.sandbox.native.records import Record, TreeError, end_record
from proctor.sandbox.native.records import encode as encode_record
from proctor.sandbox.native.tree import directory_to_tree, tar_to_tree, tree_to_directory, tree_to_tar

from .guests import ENV, dev_guest

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


def listing(root: Path) -> list[str]:
    """Every entry below `root`: path, mode, time, link target, links."""
    command = ["find", ".", "-mindepth", "1", "-printf", "%p %m %T@ %l %n\\0"]
    return sorted(
        subprocess.run(command, cwd=root, check=True, capture_output=True).stdout.decode("latin1").split("\0")
    )


def deep(root: Path, levels: int) -> None:
    """A chain of directories longer than PATH_MAX."""
    descriptor = os.open(root, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)


async def test_a_file_is_written_with_its_parents_and_read_back(tmp_path: Path) -> None:
    path = f"{tmp_path}/a/b/file"
    async with dev_guest() as guest:
        await guest.write(path, b"\x00\xff" * 500_000, mode=0o750)
        assert await guest.read(path) == b"\x00\xff" * 500_000
        assert await guest.read(path, max_bytes=3) == b"\x00\xff\x00"
        found = await guest.stat(path)
    assert (found.name, found.kind, found.size, found.mode) == ("file", "file", 1_000_000, 0o750)
    assert os.listdir(tmp_path / "a/b") == ["file"]


async def test_writing_replaces_whole_files_and_can_keep_their_mode(tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_bytes(b"old")
    path.chmod(0o755)
    inode = path.stat().st_ino
    async with dev_guest() as guest:
        await guest.write(str(path), b"new", mode=None)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o755)
        assert path.stat().st_ino != inode  # a reader of the old file was not disturbed
        await guest.write(str(path), b"newer", mode=0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"newer", 0o600)


async def test_writing_follows_a_link_that_leads_somewhere_and_replaces_one_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    async with dev_guest() as guest:
        await guest.write(f"{tmp_path}/link", b"new")
        await guest.write(f"{tmp_path}/dangling", b"new")
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "dangling").is_symlink()


async def test_what_is_no_file_is_neither_read_nor_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/socket")
    async with dev_guest() as guest:
        for name, number in (("fifo", errno.EINVAL), ("socket", errno.ENXIO), ("", errno.EISDIR), ("no", errno.ENOENT)):
            with anyio.fail_after(5), pytest.raises(FileError) as caught:
                await guest.read(f"{tmp_path}/{name}")
            assert caught.value.errno == number, name
        for name in ("fifo", "socket"):
            with anyio.fail_after(5), pytest.raises(FileError):
                await guest.write(f"{tmp_path}/{name}", b"x")
        with pytest.raises(FileError) as caught:
            await guest.write("/dev/null", b"x")
    listener.close()
    assert caught.value.errno == errno.EINVAL
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


async def test_an_endless_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    async with dev_guest() as guest:
        assert await guest.read(f"{tmp_path}/sparse", max_bytes=10) == bytes(10)
        monkeypatch.setattr("proctor.sandbox.native.guestfiles.READ_MAX", 1 << 20)
        with pytest.raises(FileError) as caught:
            await guest.read(f"{tmp_path}/sparse")
    assert caught.value.errno == errno.EFBIG


async def test_a_list_holds_any_name(tmp_path: Path) -> None:
    names = [b"\xff\xfe", b"new\nline", b" ", b"-rf", b"a" * 255, "ü".encode()]
    for name in names:
        (tmp_path / os.fsdecode(name)).touch()
    (tmp_path / "link").symlink_to("new\nline")
    async with dev_guest() as guest:
        found = await guest.list(str(tmp_path))
    assert sorted(os.fsencode(entry.name) for entry in found) == sorted([*names, b"link"])
    assert next(entry.target for entry in found if entry.kind == "link") == "new\nline"


async def test_every_kind_of_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    async with dev_guest() as guest:
        assert (await guest.stat(f"{tmp_path}/fifo")).kind == "fifo"
        assert (await guest.stat("/dev/null")).kind == "char"
        assert (await guest.stat("/")).name == "/"
        with pytest.raises(FileError) as caught:
            await guest.stat(f"{tmp_path}/none")
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, f"{tmp_path}/none")


async def test_remove_is_careful_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "full/inner").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    (tmp_path / "full/link").symlink_to("../outside")
    async with dev_guest() as guest:
        with pytest.raises(FileError) as caught:
            await guest.remove(f"{tmp_path}/full")
        assert caught.value.errno == errno.ENOTEMPTY
        await guest.remove(f"{tmp_path}/full/", recursive=True)
        for bad in ("/", f"{tmp_path}/.", f"{tmp_path}/.."):
            with pytest.raises(FileError):
                await guest.remove(bad, recursive=True)
    assert os.listdir(tmp_path) == ["outside"]
    assert (tmp_path / "outside/kept").exists()


async def test_ten_thousand_levels_are_carried_out_and_removed() -> None:
    # In memory: on a disk that discards what it frees this measures the disk.
    tmp_path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    deep(tmp_path, 10_000)
    async with dev_guest() as guest:
        with anyio.fail_after(30):
            size = sum([len(chunk) async for chunk in guest.pack(str(tmp_path))])
            await guest.remove(f"{tmp_path}/d", recursive=True)
    assert size > 100_000_000  # each path is written in full
    os.rmdir(tmp_path)


async def test_a_directory_is_made_once(tmp_path: Path) -> None:
    async with dev_guest() as guest:
        await guest.mkdir(f"{tmp_path}/a/b/", mode=0o700)
        await guest.mkdir(f"{tmp_path}/a/b", mode=0o777)
        (tmp_path / "file").touch()
        with pytest.raises(FileError) as caught:
            await guest.mkdir(f"{tmp_path}/file/c")
    assert caught.value.errno == errno.ENOTDIR
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700


def odd_tree(root: Path) -> None:
    """Everything that a tree may hold."""
    (root / "sub/inner").mkdir(parents=True)
    (root / "sub/data").write_bytes(os.urandom(300_000))
    (root / "sub/run").write_text("#!/bin/sh\n")
    (root / "sub/run").chmod(0o755)
    (root / "empty").mkdir(mode=0o1777)
    (root / "empty").chmod(0o1777)
    (root / os.fsdecode(b"\xff\n")).write_bytes(b"odd")
    (root / "link").symlink_to("sub/data")
    (root / "absolute").symlink_to("/etc/passwd")
    (root / "closed").mkdir()
    (root / "closed/file").write_text("x")
    os.utime(root / "sub/data", ns=(0, 1_234_567_890_123_456_789))
    (root / "closed").chmod(0o755)


async def test_a_tree_goes_in_and_out_unchanged(tmp_path: Path) -> None:
    source, inside, outside = (tmp_path / name for name in ("source", "inside", "outside"))
    source.mkdir()
    odd_tree(source)
    async with dev_guest() as guest:
        await guest.unpack(str(inside), directory_to_tree(source))
        skipped = await guest.pull(str(inside), partial(tree_to_directory, target=outside))
        with (tmp_path / "out.tar").open("wb") as file:
            await guest.pull(str(inside), partial(tree_to_tar, out=file))
        with (tmp_path / "out.tar").open("rb") as file:
            await guest.unpack(f"{tmp_path}/again", tar_to_tree(file, links="any"))
    assert skipped == []
    expected = listing(source)
    assert listing(inside) == expected
    assert listing(tmp_path / "again") == expected
    assert [line.replace(" 1777 ", " 777 ") for line in expected] == listing(outside)


async def test_a_single_file_is_pulled_as_itself(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"content")
    async with dev_guest() as guest:
        await guest.pull(f"{tmp_path}/one", partial(tree_to_directory, target=tmp_path / "deeper/two"))
    assert (tmp_path / "deeper/two").read_bytes() == b"content"


async def test_what_cannot_be_carried_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "fifo")
    (source / "file").touch()
    async with dev_guest() as guest:
        skipped = await guest.pull(str(source), partial(tree_to_directory, target=tmp_path / "out"))
    assert [(item.path, item.reason) for item in skipped] == [("fifo", "fifo")]
    assert os.listdir(tmp_path / "out") == ["file"]


async def test_a_file_that_shrinks_while_it_is_packed_keeps_its_promise(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "file").open("wb") as file:
        file.truncate(64 << 20)
    async with dev_guest() as guest:
        chunks = guest.pack(str(source))
        received = [await anext(chunks)]
        await anyio.sleep(0.1)
        os.truncate(source / "file", 0)
        received += [chunk async for chunk in chunks]
    out = io.BytesIO()
    skipped = tree_to_tar(received, out)
    assert [item.path for item in skipped] == ["file"]
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        assert tar.getmember("file").size == 64 << 20


async def test_a_sparse_terabyte_is_refused_before_it_is_carried(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "file").open("wb") as file:
        file.truncate(1 << 40)
    async with dev_guest() as guest:
        with anyio.fail_after(10), pytest.raises(TreeError, match="bytes of content"):
            await guest.pull(str(source), partial(tree_to_directory, target=tmp_path / "out"))
        assert (await guest.exec(["/bin/true"], env=ENV)).ok
    assert os.listdir(tmp_path / "out") == []


async def test_unpacking_never_goes_through_a_link(tmp_path: Path) -> None:
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir()
    (target / "link").symlink_to(outside)
    stream = encode_record(Record("D", b"link/new", 0o755)) + end_record(1)
    async with dev_guest() as guest:
        with pytest.raises(FileError) as caught:
            await guest.unpack(str(target), [stream])
    assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert os.listdir(outside) == []


@pytest.mark.parametrize(
    "path", [b"../x", b"/x", b"a/../../x", b"a//b", b"./a", b"a\0b", b"a/.", b"a" * 5000 + b"/x", b"a" * 256]
)
async def test_the_guest_itself_refuses_unsound_paths(tmp_path: Path, path: bytes) -> None:
    async with dev_guest() as guest:
        with pytest.raises(FileError) as caught:
            await guest.unpack(f"{tmp_path}/t", [encode_record(Record("D", path, 0o755)) + end_record(1)])
    assert caught.value.errno == errno.EPROTO
    assert not (tmp_path / "x").exists()


async def test_hard_links_stay_links(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        info = tarfile.TarInfo("a/first")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
        info = tarfile.TarInfo("b/second")
        info.type, info.linkname = tarfile.LNKTYPE, "a/first"
        tar.addfile(info)
    archive.seek(0)
    async with dev_guest() as guest:
        await guest.unpack(f"{tmp_path}/t", tar_to_tree(archive))
    assert (tmp_path / "t/a/first").stat().st_ino == (tmp_path / "t/b/second").stat().st_ino


async def test_an_error_in_the_source_of_a_tree_reaches_the_caller(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "fifo")
    async with dev_guest() as guest:
        with pytest.raises(TreeError) as caught:
            await guest.unpack(f"{tmp_path}/t", directory_to_tree(source))
        assert (await guest.exec(["/bin/true"], env=ENV)).ok
    assert caught.value.field == "fifo"


async def test_a_stream_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    async with dev_guest() as guest:
        with pytest.raises(FileError) as caught:
            await guest.unpack(f"{tmp_path}/t", [encode_record(Record("F", b"f", 0o644, size=100)) + b"short"])
    assert caught.value.errno == errno.EPROTO


async def test_set_id_bits_do_not_get_in(tmp_path: Path) -> None:
    stream = encode_record(Record("F", b"f", 0o6755)) + bytes(4) + end_record(1)
    async with dev_guest() as guest:
        await guest.unpack(f"{tmp_path}/t", [stream])
    assert (tmp_path / "t/f").stat().st_mode & 0o7777 == 0o755
