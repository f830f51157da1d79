"""Data in and out: items 37 to 40, and what a sandbox leaves behind for the next: item 43."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.common import ProctorError
from proctor.sandbox.selftest.checks import Verdict, judge

if TYPE_CHECKING:
    from proctor.sandbox.selftest.checks import Hall


async def copies_out(hall: Hall) -> Verdict:
    """Links out, loops, FIFOs, sockets, holes of a terabyte and odd names come out as what they are, or by an error."""
    wrong: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "out")
        async with await hall.edge.create(hall.spec()) as box:
            probe = await hall.place(box)
            made = await box.exec([probe, "burden", "hostile-tree", "/hostile"], user="0", timeout_s=20)
            entries = await box.list("/hostile")
            if not made.ok or len(entries) < 14:
                return judge([f"only {len(entries)} entries could be made"], "")
            try:
                with anyio.fail_after(20):
                    await box.download("/hostile", target)
                whole = "copied whole"
            except ProctorError as error:
                whole = f"refused: {error.message[:80]}"
            except TimeoutError:
                whole = "not done after 20 s"
                wrong["download"] = whole
            await box.remove("/hostile/sparse")
            await box.download("/hostile", target.with_name("rest"))
        found = await anyio.to_thread.run_sync(_look, Path(folder))
    wrong |= found
    return judge(
        wrong, f"{len(entries)} entries listed by kind; with a hole of a terabyte {whole}; without it all came out"
    )


def _look(folder: Path) -> dict[str, str]:
    """What is wrong with what came out."""
    wrong = {}
    for path in folder.rglob("*"):
        info = path.lstat()
        if path.is_symlink():
            if str(path.readlink()) not in ("/etc/shadow", "../../../../etc/passwd", "loop"):
                wrong[path.name] = f"a link to {path.readlink()}"
        elif info.st_mode & 0o6000:
            wrong[path.name] = f"mode {info.st_mode & 0o7777:o}"
        elif path.is_file() and info.st_blocks * 512 > 64 << 20:
            wrong[path.name] = f"{info.st_blocks * 512} bytes on the disk"
    inside = os.path.realpath(folder)
    if not any(path.name == "plain" for path in Path(inside).rglob("*")):
        wrong["plain"] = "an ordinary file did not come out"
    return wrong


def _archive(build: str) -> bytes:
    """A hostile tar."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        if build == "traversal":
            tar.addfile(tarfile.TarInfo("../../escaped"))
        elif build == "absolute":
            tar.addfile(tarfile.TarInfo("/escaped"))
        elif build == "through a link":
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, "/"
            tar.addfile(link)
            tar.addfile(tarfile.TarInfo("link/escaped"))
        elif build == "device":
            device = tarfile.TarInfo("device")
            device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 1
            tar.addfile(device)
    return data.getvalue()


async def archives_in(hall: Hall) -> Verdict:
    """Archives that climb, go through links or bring devices leave nothing outside their target."""
    wrong: dict[str, str] = {}
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        async with await hall.edge.create(hall.spec()) as box:
            for build in ("traversal", "absolute", "through a link", "device"):
                source = Path(folder, f"{build}.tar")
                await anyio.Path(source).write_bytes(_archive(build))
                try:
                    await box.upload(source, f"/in/{build}")
                    answers.append(f"{build} contained")
                except ProctorError:
                    answers.append(f"{build} refused")
                names = {entry.name: entry.kind for entry in await box.list("/")}
                if "escaped" in names:
                    wrong[build] = "wrote outside its target"
                if not answers[-1].endswith("refused"):
                    kinds = {entry.kind for entry in await box.list(f"/in/{build}")}
                    if kinds & {"char", "block"}:
                        wrong[build] = "made a device"
    return judge(wrong, ", ".join(answers))


async def frozen_layers(hall: Hall) -> Verdict:
    """A set-uid program in a layer that a sandbox wrote gains nothing in the next."""
    async with await hall.edge.create(hall.spec()) as box:
        probe = await hall.place(box)
        await box.exec(["/bin/sh", "-c", f"cp {probe} /gain && chmod 6755 /gain"], user="0", timeout_s=20)
        await box.snapshot()
        result = await box.exec(["/gain", "ids"], user="65534:65534", timeout_s=20)
        (fork,) = await box.fork()
        async with fork:  # type: ignore[attr-defined]
            again = await fork.exec(["/gain", "ids"], user="65534:65534", timeout_s=20)
    said = {"after a snapshot": result.text.strip(), "in a fork": again.text.strip()}
    wrong = {key: value for key, value in said.items() if value != "65534 65534"}
    return judge(wrong, "set-uid root, started by 65534 after snapshot and in a fork: 65534 65534")


async def clean_rooms(hall: Hall) -> Verdict:
    """What one sandbox plants is not there in the next of the same image, nor after a reset."""
    plants = ("/root/.bashrc", "/etc/profile", "/usr/local/bin/python3", "/etc/ld.so.preload", "/conftest.py")
    script = "".join(f"mkdir -p $(dirname {path}) 2>/dev/null; echo planted >> {path} 2>/dev/null; " for path in plants)
    look = "cat " + " ".join(plants) + " 2>/dev/null | grep -c planted; true"
    async with await hall.edge.create(hall.spec()) as box:
        await box.exec(["/bin/sh", "-c", script], user="0", timeout_s=20)
        before = (await box.exec(["/bin/sh", "-c", look], timeout_s=20)).text.strip()
        async with await hall.edge.create(hall.spec()) as fresh:
            other = (await fresh.exec(["/bin/sh", "-c", look], timeout_s=20)).text.strip()
        await box.reset()
        after = (await box.exec(["/bin/sh", "-c", look], timeout_s=20)).text.strip()
    wrong = {name: said for name, said in (("in a new sandbox", other), ("after a reset", after)) if said != "0"}
    if before in ("", "0"):
        wrong["planting"] = "did not work"
    return judge(wrong, f"{before} files planted; none in a new sandbox of the image, none after a reset")
