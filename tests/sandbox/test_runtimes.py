"""What a runtime cannot do is refused by the field's name; what it achieves is honoured, refused and on the receipt."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import ProctorError, RefusedError
from proctor.sandbox import Edge, Lifecycle, Resources, SandboxSpec, Tier
from proctor.sandbox.native.cgroup import CgroupLayout
from proctor.sandbox.native.guardfilter import docker_program, gvisor_program
from proctor.sandbox.native.syscall_numbers import numbers
from proctor.sandbox.runtimes.capabilities import CAPABILITIES, achieved, capabilities_of
from proctor.sandbox.sweep import home_tag, sweep_dead

from .edges import gauges, small, until
from .test_seccomp import _TOKEN as TOKENS
from .test_seccomp import ALLOW, call, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.sandbox.native.syscall_numbers import Arch


def test_tiers_are_ordered_as_they_isolate() -> None:
    ranks = [tier.rank for tier in Tier]
    assert ranks == sorted(ranks)
    assert Tier.PROCESS.rank < Tier.NAMESPACES.rank < Tier.NAMESPACES_USERNS.rank < Tier.GVISOR.rank < Tier.MICROVM.rank


@pytest.mark.parametrize("runtime", list(CAPABILITIES))
@pytest.mark.parametrize("tier", list(Tier))
def test_a_tier_is_honoured_or_refused_by_name(runtime: str, tier: Tier) -> None:
    can = capabilities_of(runtime)
    spec = SandboxSpec(runtime=runtime, min_tier=tier)  # type: ignore[arg-type]
    if tier.rank <= can.tiers[0].rank:
        can.refuse(spec)
    else:
        with pytest.raises(RefusedError) as refused:
            can.refuse(spec)
        assert refused.value.field == "min_tier"
    if tier.rank <= can.tiers[-1].rank:
        achieved(spec, can.tiers[-1])
    else:
        with pytest.raises(RefusedError, match="achieves only"):
            achieved(spec, can.tiers[-1])


def test_what_a_runtime_cannot_do_is_refused_by_its_field() -> None:
    with pytest.raises(RefusedError) as refused:
        capabilities_of("runsc").refuse(SandboxSpec(runtime="runsc", network="open"))
    assert refused.value.field == "network"
    with pytest.raises(RefusedError) as refused:
        capabilities_of("runsc").refuse(SandboxSpec(runtime="runsc", resources=Resources(memory_mb=47)))
    assert refused.value.field == "resources.memory_mb"
    with pytest.raises(RefusedError) as refused:
        capabilities_of("docker").refuse(SandboxSpec(runtime="docker", lifecycle=Lifecycle(durable=True)))
    assert refused.value.field == "lifecycle.durable"
    with pytest.raises(RefusedError) as refused:
        capabilities_of("docker").refuse(SandboxSpec(runtime="docker", resources=Resources(disk_driver="loop")))
    assert refused.value.field == "resources.disk_driver"
    with pytest.raises(RefusedError) as refused:
        capabilities_of("rkt")
    assert refused.value.field == "runtime"


# --- the filters of guests that share their user id with commands ---------------------------------------------------

_MARKED = {"gvisor": (gvisor_program, 4), "docker": (docker_program, 10)}


@pytest.mark.parametrize("kind", list(_MARKED))
@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_a_command_cannot_change_its_mark_nor_anything_of_process_1(kind: str, arch: Arch) -> None:
    make, mark = _MARKED[kind]

    def ask(name: str, *arguments: int) -> object:
        return run(make(arch), numbers(arch)[name], TOKENS[arch], arguments)

    somewhere, high_only = 0x7F00_0000_1000, 0x7F00_0000_0000
    assert ask("prlimit64", 0, mark, somewhere) == 0  # success without effect
    assert ask("prlimit64", 0, mark, high_only) == 0
    assert ask("prlimit64", 55, mark, somewhere) == 0
    assert ask("prlimit64", 0, mark, 0, somewhere) == ALLOW  # asking
    assert ask("prlimit64", 0, 7, somewhere) == ALLOW
    assert ask("prlimit64", 1, 7, somewhere) == errno.EPERM
    assert ask("prlimit64", 1, 7, 0, somewhere) == ALLOW
    if arch == "x86_64":
        assert ask("setrlimit", mark, somewhere) == 0
        assert ask("setrlimit", 7, somewhere) == ALLOW


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_under_gvisor_nobody_signals_process_1(arch: Arch) -> None:
    def ask(name: str, *arguments: int) -> object:
        return run(gvisor_program(arch), numbers(arch)[name], TOKENS[arch], arguments)

    for name, arguments in (("kill", (1, 9)), ("tkill", (1, 9)), ("tgkill", (1, 1, 9)), ("tgkill", (7, 1, 9)),
                            ("rt_sigqueueinfo", (1, 9, 0)), ("rt_tgsigqueueinfo", (1, 1, 9, 0)), ("pidfd_open", (1, 0)),
                            ("fcntl", (3, 8, 1)), ("fcntl", (3, 15, 0)), ("ioctl", (3, 0x8901, 0))):  # fmt: skip
        assert ask(name, *arguments) == errno.EPERM, (name, arguments)
    for name, arguments in (("kill", (2, 9)), ("kill", (0xFFFF_FFFF, 9)), ("tgkill", (7, 7, 9)), ("fcntl", (3, 4, 1)),
                            ("ioctl", (1, 0x5413, 0)), ("read", (1, 0, 0)), ("mount", (0, 0, 0))):  # fmt: skip
        assert ask(name, *arguments) == ALLOW, (name, arguments)


def test_the_filter_of_docker_is_the_native_one_but_for_limits() -> None:
    for name, number in numbers("x86_64").items():
        if name not in ("setrlimit", "prlimit64"):
            assert run(docker_program("x86_64"), number, TOKENS["x86_64"]) == call("x86_64", name), name


# --- gVisor ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=1) as made:
        yield made


async def ready(edge: Edge) -> None:
    try:
        await edge.ready("runsc")
    except ProctorError as error:
        pytest.skip(f"runtime runsc: {error.message}")


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_gvisor_is_what_answers_and_the_receipt_says_so(edge: Edge) -> None:
    await ready(edge)
    async with await edge.create(small(runtime="runsc", min_tier=Tier.GVISOR)) as box:
        release = (await box.exec(["uname", "-r"])).text.strip()
        assert release != os.uname().release, "a system call has reached the machine's kernel"
        receipt = await box.close()
    assert (receipt.tier, receipt.runtime) == (Tier.GVISOR, "container/runsc")
    assert receipt.kernel.startswith("gVisor ")
    assert os.uname().release in receipt.kernel
    assert "gVisor itself included" in receipt.limit_mechanisms["memory"]


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_a_tier_that_the_runtime_does_not_reach_is_refused_before_anything_is_made(edge: Edge) -> None:
    with pytest.raises(RefusedError) as refused:
        await edge.create(small(min_tier=Tier.GVISOR))
    assert refused.value.field == "min_tier"
    assert "runsc" in str(refused.value.remedy)
    assert not edge.boxes


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_a_runsc_that_runs_nothing_is_refused_with_its_own_words(edge: Edge, tmp_path: Path) -> None:
    broken = tmp_path / "bin/runsc"
    broken.parent.mkdir()
    shutil.copyfile("/bin/sh", broken)  # dynamically linked: its room has no loader for it
    broken.chmod(0o755)
    before = gauges(tmp_path)
    with pytest.raises(RefusedError, match=r"does not run|runs nothing here") as refused:
        await edge.ready("runsc")
    assert "scripts/setup --runtimes" in str(refused.value.remedy)
    await until(lambda: gauges(tmp_path) == before)


_LIFE = """
import sys, anyio
from pathlib import Path
from proctor.sandbox import Edge, SandboxSpec
async def main():
    async with Edge(Path(sys.argv[1]), pool_size=1) as edge:
        box = await edge.create(SandboxSpec(runtime="runsc"))
        await box.exec("sleep 1000 &", keep=True)
        print(box.host_pid, flush=True)
        await anyio.sleep(1000)
anyio.run(main)
"""


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_when_the_edge_is_killed_nothing_of_gvisor_is_left(edge: Edge, tmp_path: Path) -> None:
    await ready(edge)
    before, sentries = gauges(tmp_path), _sentries()
    process = await anyio.to_thread.run_sync(
        lambda: subprocess.Popen([sys.executable, "-c", _LIFE, str(tmp_path)], stdout=subprocess.PIPE)
    )
    assert process.stdout is not None
    pid = int(await anyio.to_thread.run_sync(process.stdout.readline))
    assert _sentries() - sentries, "gVisor runs"
    process.send_signal(signal.SIGKILL)
    await anyio.to_thread.run_sync(process.wait)
    process.stdout.close()
    await until(lambda: not os.path.exists(f"/proc/{pid}") and not _sentries() - sentries)
    await sweep_dead(tmp_path, CgroupLayout.detect())
    assert [name for name in CgroupLayout.detect().edges() if name.startswith(home_tag(tmp_path))] == [edge.id]
    assert gauges(tmp_path) == replace(before, descriptors=gauges(tmp_path).descriptors)


def _sentries() -> set[int]:
    """Processes of gVisor on this machine, by what they execute."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith((b"runsc-sandbox", b"runsc-gofer", b"/stage/runsc")):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found
