"""Files: in and out, as bytes, with the rights of a user."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox.conformance.checks import Subject, expect, expect_ok
from proctor.sandbox.contract import FileError

if TYPE_CHECKING:
    from collections.abc import Awaitable


async def _refused(what: Awaitable[object], number: int, claim: str) -> None:
    try:
        await what
    except FileError as error:
        expect(error.errno == number, claim, error)
    else:
        expect(False, claim)


async def round_trip(subject: Subject) -> None:
    """What is written is read again, byte for byte, with its mode."""
    data = os.urandom(1 << 20)
    async with subject.box() as box:
        await box.write("/srv/deep/er/file", data, mode=0o640)
        expect(await box.read("/srv/deep/er/file") == data, "a megabyte is the same")
        expect(await box.read("/srv/deep/er/file", max_bytes=10) == data[:10], "a part of it is, too")
        expect((await box.stat("/srv/deep/er/file")).mode == 0o640, "the mode is as given")
        size = expect_ok(await box.exec("wc -c < /srv/deep/er/file")).text
        expect(int(size) == len(data), "commands see it", size)
        await box.remove("/srv/deep", recursive=True)
        await _refused(box.read("/srv/deep/er/file"), errno.ENOENT, "a removed file is ENOENT")


async def names_are_bytes(subject: Subject) -> None:
    """A name that is not UTF-8 is listed, read and removed like any other; a link is not followed."""
    async with subject.box() as box:
        expect_ok(await box.exec(r"""mkdir /srv/d; cd /srv/d; printf x > "$(printf 'a\377b')"; ln -s /etc/passwd l"""))
        found = {one.name: one for one in await box.list("/srv/d")}
        expect(sorted(found) == ["a\udcffb", "l"], "both are listed", sorted(found))
        expect((found["l"].kind, found["l"].target) == ("link", "/etc/passwd"), "the link is a link", found["l"])
        expect(await box.read("/srv/d/a\udcffb") == b"x", "it can be read")
        await box.remove("/srv/d/a\udcffb")
        expect([one.name for one in await box.list("/srv/d")] == ["l"], "and removed")


async def rights_of_a_user(subject: Subject) -> None:
    """Reading and writing as a user has that user's rights."""
    async with subject.box() as box:
        await box.write("/srv/secret", b"root only", mode=0o600)
        await _refused(box.read("/srv/secret", user="1000"), errno.EACCES, "another user may not read it")
        await _refused(box.write("/etc/x", b"", user="1000"), errno.EACCES, "another user may not write there")
        await box.write("/tmp/mine", b"x", user="1000")
        expect((await box.stat("/tmp/mine")).uid == 1000, "what a user writes belongs to it")


async def trees(subject: Subject) -> None:
    """A directory goes in and comes out again, with links and modes."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        await anyio.to_thread.run_sync(_make_tree, source)
        async with subject.box() as box:
            await box.upload(source, "/srv/tree")
            expect_ok(await box.exec("test -x /srv/tree/sub/run && test -L /srv/tree/link && /srv/tree/sub/run"))
            await box.download("/srv/tree", target)
        expect(_tree(source) == _tree(target), "both are the same", _tree(target))


def _make_tree(root: Path) -> None:
    (root / "sub/empty").mkdir(parents=True)
    (root / "file").write_bytes(bytes(range(256)))
    (root / "sub/run").write_text("#!/bin/sh\nexit 0\n")
    (root / "sub/run").chmod(0o755)
    (root / "link").symlink_to("sub/run")


def _tree(root: Path) -> dict[str, tuple[int, str | bytes]]:
    found: dict[str, tuple[int, str | bytes]] = {}
    for path in sorted(root.rglob("*")):
        content: str | bytes = str(path.readlink()) if path.is_symlink() else b""
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (path.lstat().st_mode, content)
    return found


async def views_are_read_only(subject: Subject) -> None:
    """A mount shows a directory of the machine and can never be written to."""
    from proctor.sandbox.contract import Mount

    subject.needs(subject.can.mounts, "mounts")
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder)
        _show(shown)
        async with subject.box(mounts=(Mount(shown, "/view"),)) as box:
            expect(await box.read("/view/file") == b"from outside", "it can be read")
            for change in ("echo x > /view/new", "echo x > /view/file", "rm /view/file", "chmod 777 /view"):
                result = await box.exec(change)
                expect(result.exit_code != 0, f"{change!r} fails", result)
        expect(_tree(shown) == {"file": (0o100644, b"from outside")}, "nothing has changed", _tree(shown))


def _show(folder: Path) -> None:
    (folder / "file").write_text("from outside")
    (folder / "file").chmod(0o644)
    folder.chmod(0o755)


CHECKS = (round_trip, names_are_bytes, rights_of_a_user, trees, views_are_read_only)
