"""Programs with a C library of their own: the edit, and the proof in an image that has nothing at all."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from proctor.sandbox.contract import Image, ImageError, Layer, SandboxSpec
from proctor.sandbox.images.relocate import interpreter, relocated_loader, set_interpreter

SYSTEM_LOADER = Path("/lib64/ld-linux-x86-64.so.2")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not SYSTEM_LOADER.exists(), reason="needs glibc for x86-64, as Debian lays it out"
)
HOME = "/opt/proctor"


def test_the_loader_that_a_program_names_is_read_and_replaced(tmp_path: Path) -> None:
    program = tmp_path / "true"
    shutil.copy("/bin/true", program)
    before = program.read_bytes()
    assert interpreter(before) == str(SYSTEM_LOADER)
    set_interpreter(program, f"{HOME}/ld.so")
    after = program.read_bytes()
    assert interpreter(after) == f"{HOME}/ld.so"
    # Nothing moved, and nothing else changed.
    assert len(after) == len(before)
    changed = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert changed[-1] - changed[0] < len(str(SYSTEM_LOADER))


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 200])
def test_what_is_no_dynamic_program_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert interpreter(content) is None
    with pytest.raises(ImageError, match="not a dynamic program"):
        set_interpreter(path, "/x")
    assert path.read_bytes() == content
    with pytest.raises(ImageError, match="it is not Debian's"):
        relocated_loader(content, f"{HOME}/lib")


def test_a_name_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "true"
    shutil.copy("/bin/true", program)
    with pytest.raises(ImageError, match="no room"):
        set_interpreter(program, "/a/loader/with/a/long/name.so")
    with pytest.raises(ImageError, match="longer than"):
        relocated_loader(SYSTEM_LOADER.read_bytes(), "/a/directory/with/a/long/name")


def island(root: Path) -> Path:
    """An image with nothing in it but `ls`, and what that needs; and traps where the system's loader would look."""
    home = root / HOME[1:]
    (home / "lib").mkdir(parents=True)
    for name in ("dev", "proc", "sys", "tmp", "etc"):
        (root / name).mkdir()
    libraries = subprocess.run(["ldd", "/bin/ls"], capture_output=True, text=True, check=True).stdout
    for path in [word for word in libraries.split() if word.startswith("/") and "ld-linux" not in word]:
        shutil.copy(path, home / "lib" / Path(path).name)
    shutil.copy("/bin/ls", home / "ls")
    (home / "ld.so").write_bytes(relocated_loader(SYSTEM_LOADER.read_bytes(), f"{HOME}/lib"))
    set_interpreter(home / "ls", f"{HOME}/ld.so")
    for folder in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "libc.so.6").write_text("not a library")
    (root / "etc/ld.so.preload").write_text("/lib64/libc.so.6\n")
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)
    return root


@pytest.mark.sandbox
@pytest.mark.anyio
async def test_a_program_runs_in_an_image_without_a_c_library_and_loads_nothing_of_the_image(tmp_path: Path) -> None:
    from proctor import sandbox

    layer = Layer(path=island(tmp_path / "image"))
    image = Image(ref="empty", digest="sha256:" + "0" * 64, layers=(layer,))
    async with sandbox.create(SandboxSpec(image=image)) as box:
        result = await box.exec([f"{HOME}/ls", "/opt"], timeout_s=30)
    assert (result.exit_code, result.text, result.error_text) == (0, "proctor\n", "")
