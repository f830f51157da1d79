"""Layers against the kernel: whatever a sandbox does to its disk, the export applied to the base gives what it saw."""

from __future__ import annotations

import io
import os
import random
import shlex
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard

from proctor.sandbox import Edge, Layer

from .edges import small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proctor.sandbox.box import Box

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

NAMES = ("a", "b", "c d", "-e", "ü")
SEEDS = range(12)


def base(root: Path) -> Path:
    """A layer with a small tree at /w."""
    for name in NAMES:
        for below in NAMES[:3]:
            (root / "w" / name / below).mkdir(parents=True)
            (root / "w" / name / below / "file").write_text(f"{name}/{below}")
    (root / "w/link").symlink_to("a")
    os.link(root / "w/a/a/file", root / "w/a/hard")
    return root


def operations(dice: random.Random, count: int) -> Iterator[str]:
    """Lines of shell that change /w at random; those that make no sense fail, which is fine."""

    def path() -> str:
        return shlex.quote("/w/" + "/".join(dice.choice(NAMES) for _ in range(dice.randint(1, 3))))

    for number in range(count):
        one, two = path(), path()
        yield dice.choice(
            (
                f"echo {number} > {one}",
                f"echo {number} >> {one}/file",
                f"mkdir -p {one}",
                f"rm -rf {one}",
                f"rm -rf {one}; mkdir {one}; echo anew > {one}/file",
                f"mv -T {one} {two}",
                f"cp -rT {one} {two}",
                f"chmod {dice.choice(('700', '755', '4755'))} {one}",
                f"ln -sfT {two} {one}",
                f"ln -fT {one}/file {two}",
                f"touch {one}/file",
                f"truncate -s 100000 {one}/file",
            )
        )


async def changed(box: Box, seed: int) -> None:
    lines = operations(random.Random(seed), 40)
    assert (await box.exec("exec 2>/dev/null; umask 022\n" + "\n".join(f"{line} || :" for line in lines))).ok


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below /w that a program could see, except times."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, dirs, files in os.walk(root / "w"):
        for name in (*dirs, *files):
            path = Path(folder, name)
            info = path.lstat()
            content: object = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()
            mode = 0 if path.is_symlink() else info.st_mode
            found[str(path.relative_to(root))] = (mode, info.st_uid, info.st_gid, content)
    return found


def apply(export: Path, root: Path) -> None:
    """What the OCI specification says about applying a layer, in its simplest form."""
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(export.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extraction_filter = lambda member, _: member  # our own archive, set-id bits and all
        for member in tar:
            path = root / member.name
            if path.name == ".wh..wh..opq":
                for child in path.parent.iterdir():
                    remove(child)
            elif path.name.startswith(".wh."):
                remove(path.with_name(path.name[4:]))
            else:
                if os.path.lexists(path) and not (member.isdir() and path.is_dir() and not path.is_symlink()):
                    remove(path)
                tar.extract(member, root, numeric_owner=True)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("seed", SEEDS)
async def test_export_applied_to_the_base_is_what_the_sandbox_saw(tmp_path: Path, seed: int) -> None:
    layer = base(tmp_path / "base")
    async with Edge(tmp_path / "home", pool_size=1) as edge:
        box = await edge.create(small(layers=(Layer(layer),)))
        await changed(box, seed)
        if seed % 3 == 0:
            # The same through one more layer: what was frozen is below, and only the rest is exported.
            await box.export_diff(tmp_path / "first.tar.zst")
            await box.snapshot()
            await changed(box, seed + 1000)
        await box.download("/w", tmp_path / "seen" / "w")
        owners = (await box.exec("cd / && find w -mindepth 1 -printf '%p %U %G %m\\n'")).text
        await box.export_diff(tmp_path / "diff.tar.zst")
        entries = await box.diff()
    shutil.copytree(layer, tmp_path / "built", symlinks=True)
    for export in (tmp_path / "first.tar.zst", tmp_path / "diff.tar.zst"):
        if export.exists():
            apply(export, tmp_path / "built")
    built, seen = tree(tmp_path / "built"), tree(tmp_path / "seen")
    assert {name: facts[3] for name, facts in built.items()} == {name: facts[3] for name, facts in seen.items()}
    assert sorted(owners.splitlines()) == sorted(
        f"{name} {facts[1]} {facts[2]} {facts[0] & 0o7777 or 0o777:o}"  # type: ignore[operator]
        for name, facts in built.items()
    )
    if seed % 3:
        before = tree(layer)
        for entry in entries:
            name = entry.path[1:]
            if not name.startswith("w/"):
                continue
            assert (name in before, name in built) == {
                "added": (False, True),
                "modified": (True, True),
                "deleted": (True, False),
            }[entry.change], entry
        told = {entry.path[1:] for entry in entries}
        for name in {*before, *built}:
            if before.get(name) != built.get(name):
                parents = {str(parent) for parent in Path(name).parents}
                assert name in told or parents & told, f"{name} changed and nothing says so"
