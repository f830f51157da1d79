"""What is particular to runtime `docker`: its hardening, its images, its leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import ProctorError, RefusedError
from proctor.sandbox import Edge, Image, LaunchError, Layer, Tier
from proctor.sandbox.native.launcher import LauncherConfig
from proctor.sandbox.runtimes.docker.engine import Engine, socket_path
from proctor.sandbox.runtimes.docker.profile import seccomp_profile
from proctor.sandbox.sweep import home_tag

from .edges import small, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox, pytest.mark.usefixtures("docker_engine")]


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=1) as made:
        try:
            await made.ready("docker")
        except ProctorError as error:
            pytest.skip(f"runtime docker: {error.message}")
        yield made


async def ours(home: Path) -> list[str]:
    """Names of all containers of this home that the engine has."""
    engine = Engine(socket_path())
    try:
        filters = json.dumps({"label": [f"dev.proctor.home={home_tag(home)}"]})
        found = await engine.call("GET", "/containers/json", query={"all": "1", "filters": filters})
        return [one["Names"][0] for one in found]
    finally:
        await engine.aclose()


async def test_a_container_has_every_hardening_of_the_engine(edge: Edge) -> None:
    async with await edge.create(small(runtime="docker")) as box:
        engine = Engine(socket_path())
        try:
            assert box._live is not None
            facts = await engine.call("GET", f"/containers/{box._live.slot}/json")
        finally:
            await engine.aclose()
        host = facts["HostConfig"]
        assert host["NetworkMode"] == "none"
        assert host["CapDrop"] == ["ALL"]
        assert not {"SYS_ADMIN", "SYS_PTRACE", "MKNOD", "NET_RAW", "NET_ADMIN"} & set(host["CapAdd"])
        assert not host["Privileged"]
        assert "no-new-privileges" in host["SecurityOpt"]
        assert host["MemorySwap"] == host["Memory"] == 64 << 20
        assert host["PidsLimit"] == 33
        assert all(bind.endswith(":ro") for bind in host["Binds"])
        # What the commands see of it: no capability but ours, no new privileges, a filter, one device of the network.
        status = (await box.exec("grep -E 'NoNewPrivs|Seccomp:|CapBnd' /proc/self/status")).text.split()
        assert status[status.index("NoNewPrivs:") + 1] == "1"
        assert status[status.index("Seccomp:") + 1] == "2"
        assert int(status[status.index("CapBnd:") + 1], 16) & (1 << 13 | 1 << 19 | 1 << 21 | 1 << 27) == 0
        for forbidden in ("mount -t tmpfs x /mnt", "unshare -U true", "unshare -m true", "mknod /tmp/d b 7 0"):
            assert not (await box.exec(forbidden)).ok, forbidden
        receipt = await box.close()
    assert (receipt.tier, receipt.runtime) == (Tier.NAMESPACES, "container/docker")
    assert "Docker" in receipt.kernel
    assert receipt.limit_mechanisms["disk"].startswith("watched")


async def test_the_guest_is_no_change_and_no_file_that_can_be_written(edge: Edge) -> None:
    async with await edge.create(small(runtime="docker")) as box:
        assert not (await box.exec("echo x > /.proctor-init")).ok
        assert not (await box.exec("rm /.proctor-init")).ok
        assert await box.diff() == []


async def test_a_stack_with_deletions_and_links_becomes_an_image(edge: Edge, tmp_path: Path) -> None:
    """Layers of our store are not the engine's: whiteouts, opaque directories and hard links have to come through."""
    async with await edge.create(small()) as native:
        await native.exec(
            "mkdir -p /srv/d && echo 1 > /srv/d/a && ln /srv/d/a /srv/d/b && rm /etc/group && rm -r /media "
            "&& mkdir /media && echo new > /media/x && chown 7:8 /srv/d/a && chmod 2750 /srv/d"
        )
        layer = await native.snapshot()
        async with await edge.create(small(runtime="docker", layers=(layer,))) as box:
            look = "stat -c '%i' /srv/d/a /srv/d/b | uniq | wc -l; stat -c '%u %g %a' /srv/d/a /srv/d; ls /media; \
                test ! -e /etc/group && echo gone"
            assert (await box.exec(look)).text.split() == ["1", "7", "8", "644", "0", "0", "2750", "x", "gone"]


async def test_a_native_sandbox_starts_from_what_a_container_left(edge: Edge) -> None:
    """As grading does."""
    async with await edge.create(small(runtime="docker")) as box:
        await box.exec("echo 1 > /srv/one; rm /etc/group; chown 7 /srv/one")
        layer = await box.snapshot()
        assert layer.size_bytes is not None
        assert layer.size_bytes < 1 << 20
        async with await edge.create(small(layers=(layer,))) as native:
            look = "cat /srv/one; stat -c %u /srv/one; test ! -e /etc/group && echo gone"
            assert (await native.exec(look)).text.split() == ["1", "7", "gone"]
            assert await native.diff() == []


async def test_what_is_frozen_is_removed_from_the_engine_when_nobody_needs_it(edge: Edge, tmp_path: Path) -> None:
    async with await edge.create(small(runtime="docker")) as box:
        await box.exec("echo 1 > /srv/one")
        layer = await box.snapshot()
        assert len(await ours(tmp_path)) == 2
        await box.close()
    driver = await edge.ready("docker")
    await until(lambda: not edge.boxes)
    await driver.sweep(frozenset())
    assert len(await ours(tmp_path)) == 1, "the layer is still held"
    await edge.drop(layer)
    await until(lambda: not edge.burying)
    await driver.sweep(frozenset())
    assert await ours(tmp_path) == []


_LIFE = """
import sys, anyio
from pathlib import Path
from proctor.sandbox import Edge, SandboxSpec
async def main():
    async with Edge(Path(sys.argv[1]), pool_size=1) as edge:
        box = await edge.create(SandboxSpec(runtime="docker"))
        await box.exec("sleep 1000 &", keep=True)
        print(box.host_pid, flush=True)
        await anyio.sleep(1000)
anyio.run(main)
"""


async def test_when_the_edge_is_killed_its_containers_end_and_the_next_one_removes_them(
    edge: Edge, tmp_path: Path
) -> None:
    process = await anyio.to_thread.run_sync(
        lambda: subprocess.Popen([sys.executable, "-c", _LIFE, str(tmp_path)], stdout=subprocess.PIPE)
    )
    assert process.stdout is not None
    pid = int(await anyio.to_thread.run_sync(process.stdout.readline))
    process.send_signal(signal.SIGKILL)
    await anyio.to_thread.run_sync(process.wait)
    process.stdout.close()
    await until(lambda: not os.path.exists(f"/proc/{pid}"))  # the guest sees the end of its input
    assert len(await ours(tmp_path)) == 1
    await (await edge.ready("docker")).sweep(frozenset())
    assert await ours(tmp_path) == []


async def test_an_engine_that_is_not_there_or_not_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Edge(tmp_path, pool_size=1) as edge:
        for host, words in (
            ("unix:///no/such.sock", "does not answer"),
            ("tcp://192.0.2.1:2375", "DOCKER_HOST is tcp"),
        ):
            monkeypatch.setenv("DOCKER_HOST", host)
            with pytest.raises(RefusedError, match=words) as refused:
                await edge.create(small(runtime="docker"))
            assert refused.value.field == "runtime"
        assert not edge.boxes


async def test_without_native_sandboxes_an_edge_still_runs_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is too old, a machine without control groups for us: Docker is all there is."""
    monkeypatch.setattr("proctor.sandbox.runtimes.native.LauncherConfig", _unbuilt)
    async with Edge(tmp_path, pool_size=1) as edge:
        try:
            await edge.ready("docker")
        except ProctorError as error:
            pytest.skip(f"runtime docker: {error.message}")
        async with await edge.create(small(runtime="docker")) as box:
            assert (await box.exec("echo fine")).text == "fine\n"
        for runtime in ("native", "runsc"):
            with pytest.raises(LaunchError, match="is not built"):
                await edge.create(small(runtime=runtime))
    assert [path.name for path in (tmp_path / "edges").iterdir()] == ["lock"]


def _unbuilt(**fields: object) -> LauncherConfig:
    return LauncherConfig(**fields, binary=Path("/no/such/proctor-init"))  # type: ignore[arg-type]


async def test_an_image_that_cannot_start_is_a_launch_error_and_leaves_nothing(edge: Edge, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / ".proctor-init").mkdir(parents=True)  # where the guest should be mounted, there is a directory
    image = Image("odd", "sha256:00", (Layer(layer),))
    with pytest.raises(ProctorError, match="docker"):
        await edge.create(small(runtime="docker", image=image))
    await until(lambda: not edge.boxes)
    assert await ours(tmp_path) == []


def test_the_profile_of_the_engine_is_our_table() -> None:
    profile = json.loads(seccomp_profile())
    allowed = set(profile["syscalls"][0]["names"])
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert not {"mount", "bpf", "keyctl", "io_uring_setup", "kexec_load", "init_module", "userfaultfd"} & allowed
    assert {"read", "clone3", "execve", "prlimit64"} <= allowed
