"""Launcher and guest built with AddressSanitizer and UBSan: a fault ends the process, so a life that works had none.

The whole suite can be run on such a build: `PROCTOR_INIT=/path/to/it pytest tests/sandbox`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox.contract import LaunchError
from proctor.sandbox.native.carried import AddressError
from proctor.sandbox.native.launcher import BINARY, Launcher, LauncherConfig
from proctor.sandbox.native.plan import Bind, Limits

from .carrying import DIAL, all_over, echo, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.sandbox.native.plan import Plan

    from .conftest import MakeRoom

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox, pytest.mark.slow]

CSRC = BINARY.parent.parent / "csrc"


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The binary with sanitizers."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("sanitized") / "proctor-init"
    flags = ["-std=c11", "-g", "-O1", "-D_GNU_SOURCE", "-fno-strict-aliasing"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [compiler, *flags, "-o", target, *sorted(CSRC.glob("*.c"))]
    built = subprocess.run(command, capture_output=True, text=True)
    if "libasan" in built.stderr or "sanitize" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    return target


@pytest.fixture(scope="module")
async def checked(sanitized: Path) -> AsyncIterator[Launcher]:
    launcher = await Launcher.start(LauncherConfig(edge=f"asan-{os.getpid()}", pool=2, binary=sanitized))
    yield launcher
    await launcher.close()


@pytest.mark.parametrize("forced", [False, True])
async def test_lives(checked: Launcher, make_room: MakeRoom, tmp_path: Path, forced: bool) -> None:
    binds = (Bind(Path("/usr"), "/usr"), Bind(tmp_path, "/made/for/it"))
    for _ in range(3):
        async with make_room(checked, force_paths=forced, binds=binds) as room:
            result = await room.sh("head -c 3M /dev/zero; echo error >&2; (sleep 60 &)", timeout_s=30)
            assert result.stdout.total == 3 << 20
            assert result.error_text == "error\n"


async def test_a_carried_network(checked: Launcher, make_room: MakeRoom) -> None:
    """Both ways at once, with a program that reads late, so that bytes wait in the guest."""
    program = DIAL + (
        "import threading\nthreading.Thread(target=lambda: (s.sendall(bytes(9_000_000)), s.shutdown(socket.SHUT_WR)))"
        ".start()\ntime.sleep(1)\nprint(sum(map(len, iter(lambda: s.recv(99_999), b''))))\n"
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for _ in range(999): u.sendto(bytes(20), ('127.0.0.53', 53))"
    )
    async with make_room(checked) as room, serving(room, echo):
        assert (await room.python(program)).text == "9000000\n"
        await all_over(room)
        with pytest.raises(AddressError):
            await room.channel.connect(9)
        assert await room.channel.kill_all() == 0


async def test_failures(checked: Launcher, base_plan: Plan) -> None:
    bad: list[dict[str, object]] = [
        {"layers": (Path("/does/not/exist"),)},
        {"binds": (Bind(Path("/does/not/exist"), "/x"),)},
        {"binds": (Bind(Path("/usr"), "/usr"), Bind(Path("/etc/passwd"), "/usr/bin"))},
        {"limits": Limits(64 << 20, 10, cpu_quota_us=1)},
        {"layers": (0,)},
    ]
    for change in bad:
        with pytest.raises(LaunchError):
            await checked.launch(replace(base_plan, **change))  # type: ignore[arg-type]
    (await checked.launch(base_plan)).close()
