"""Disks: diff, snapshot, fork, reset, export."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import zstandard

from proctor.sandbox.conformance.checks import Subject, expect, expect_ok

if TYPE_CHECKING:
    from proctor.sandbox.box import Box

_CHANGES = """
    set -e
    mkdir -p /srv/new/deep; printf content > /srv/new/deep/file; chmod 750 /srv/new/deep/file
    ln -s file /srv/new/deep/link; echo more >> /etc/passwd; rm /etc/group
"""


async def _changes(box: Box) -> dict[str, str]:
    return {entry.path: f"{entry.change} {entry.kind}" for entry in await box.diff()}


async def fresh_is_unchanged(subject: Subject) -> None:
    """A sandbox that has only been looked at has changed nothing."""
    async with subject.box() as box:
        expect_ok(await box.exec("ls -R /etc /srv /tmp > /dev/null; cat /etc/passwd > /dev/null"))
        expect(await _changes(box) == {}, "no difference", await _changes(box))


async def diff(subject: Subject) -> None:
    """A diff names what was added, modified and deleted, with kind, size and mode."""
    async with subject.box() as box:
        expect_ok(await box.exec(_CHANGES))
        entries = {entry.path: entry for entry in await box.diff()}
        wanted = {
            "/srv/new": "added dir",
            "/srv/new/deep": "added dir",
            "/srv/new/deep/file": "added file",
            "/srv/new/deep/link": "added link",
            "/etc/passwd": "modified file",
            "/etc/group": "deleted file",
        }
        found = {path: f"{one.change} {one.kind}" for path, one in entries.items()}
        expect(found == wanted, "exactly what was done", found)
        file = entries["/srv/new/deep/file"]
        expect((file.size, file.mode) == (7, 0o750), "with size and mode", file)


async def owners(subject: Subject) -> None:
    """Owners and modes of what is changed are kept in a snapshot."""
    async with subject.box() as box:
        expect_ok(await box.exec("cd /srv; echo x > f; chown 1234:2345 f; chmod 4711 f; mkdir s; chmod 3775 s"))
        layer = await box.snapshot()
        async with subject.box(layers=(layer,)) as other:
            text = expect_ok(await other.exec("cd /srv; stat -c '%u %g %a' f s")).text
            expect(text == "1234 2345 4711\n0 0 3775\n", "they are the same", text)


async def snapshot(subject: Subject) -> None:
    """A snapshot is a layer that other sandboxes start from; the sandbox goes on above it, without its processes."""
    async with subject.box() as box:
        expect_ok(await box.exec(_CHANGES))
        await box.exec("sleep 1000 &", keep=True)
        layer = await box.snapshot()
        expect(await _changes(box) == {}, "the diff starts afresh", await _changes(box))
        left = (await box.exec("cat /srv/new/deep/file; cat /proc/[0-9]*/comm")).text
        expect(left.startswith("content") and "sleep" not in left, "files are kept, processes are not", left)
        expect_ok(await box.exec("echo later > /srv/later"))
        async with subject.box(layers=(layer,)) as other:
            result = await other.exec("cat /srv/new/deep/file; test ! -e /etc/group && test ! -e /srv/later")
            expect(result.ok and result.text == "content", "another sandbox starts from it", result)


async def fork(subject: Subject) -> None:
    """Forks start from the same disk and change only their own."""
    async with subject.box() as box:
        expect_ok(await box.exec("echo common > /srv/file"))
        first, second = await box.fork(2)
        async with first, second:  # type: ignore[attr-defined]
            expect_ok(await first.exec("echo first > /srv/file"))
            expect_ok(await second.exec("rm /srv/file"))
            expect((await box.exec("cat /srv/file")).text == "common\n", "the first one keeps its own")
            expect((await first.exec("cat /srv/file")).text == "first\n", "a fork has its own")
            expect((await second.exec("cat /srv/file")).exit_code != 0, "and so has the other")


async def reset(subject: Subject) -> None:
    """A reset drops every change and every process."""
    async with subject.box() as box:
        expect_ok(await box.exec(_CHANGES))
        await box.exec("sleep 1000 &", keep=True)
        await box.reset()
        expect(await _changes(box) == {}, "no difference is left", await _changes(box))
        result = await box.exec("test ! -e /srv/new && test -e /etc/group && cat /proc/[0-9]*/comm")
        expect(result.exit_code is not None and "sleep" not in result.text, "nothing runs", result)


async def export(subject: Subject) -> None:
    """The changes can be written as an archive, deletions as OCI whiteouts."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "diff.tar.zst")
        async with subject.box() as box:
            expect_ok(await box.exec(_CHANGES))
            await box.kill_all()
            await box.export_diff(target)
        names = await anyio.to_thread.run_sync(_names, target)
    expect({"srv/new/deep/file", "srv/new/deep/link", "etc/passwd", "etc/.wh.group"} <= names, "all are there", names)


def _names(path: Path) -> set[str]:
    with (
        path.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as plain,
        tarfile.open(fileobj=plain, mode="r|") as archive,
    ):
        return {entry.name.removeprefix("./").rstrip("/") for entry in archive}


async def deep_and_wide(subject: Subject) -> None:
    """A few hundred files and a deep directory come through a snapshot whole."""
    make = "cd /srv; i=0; while [ $i -lt 300 ]; do echo $i > f$i; i=$((i+1)); done; d=.; i=0; \
while [ $i -lt 60 ]; do d=$d/dir; i=$((i+1)); done; mkdir -p $d; echo end > $d/file"
    async with subject.box() as box:
        expect_ok(await box.exec(make))
        changes = await _changes(box)
        expect(len(changes) == 300 + 60 + 1, "each is named", len(changes))
        await box.snapshot()
        result = await box.exec("cd /srv; cat f* | wc -l; find . -name file -exec cat {} +")
        expect(result.text.split() == ["300", "end"], "each is there", result)


CHECKS = (fresh_is_unchanged, diff, owners, snapshot, fork, reset, export, deep_and_wide)
