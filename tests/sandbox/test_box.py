"""A sandbox as its caller sees it: limits by exceeding each, layers, environment, ends."""

from __future__ import annotations

import errno
import io
import os
import signal
import tarfile
from typing import TYPE_CHECKING

import pytest
import zstandard

from proctor.common import ConfigError, RefusedError
from proctor.sandbox import Edge, EndReason, FileError, Policy, Resources, SandboxLost

from .edges import small, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from proctor.sandbox.box import Box

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=2) as edge:
        yield edge


@pytest.fixture
async def box(edge: Edge) -> Box:
    return await edge.create(small())


def limited(**resources: object) -> Resources:
    return Resources(**{"cpus": 1.0, "memory_mb": 64, "disk_mb": 32, "disk_inodes": 2000, "pids": 32, **resources})  # type: ignore[arg-type]


# --- environment and commands ---------------------------------------------------------------------------------------


async def test_text_runs_in_a_shell_and_a_sequence_as_it_is(box: Box) -> None:
    assert (await box.exec("echo $((1+1)) | tr 2 3")).text == "3\n"
    assert (await box.exec(["echo", "$((1+1))"])).text == "$((1+1))\n"


async def test_the_environment_is_exactly_what_is_said(edge: Edge) -> None:
    box = await edge.create(small(env={"FROM_SPEC": "1", "LANG": "C"}))
    result = await box.exec(["env"], env={"FROM_EXEC": "2"})
    assert sorted(result.text.splitlines()) == [
        "FROM_EXEC=2",
        "FROM_SPEC=1",
        "HOME=/root",
        "LANG=C",
        "LOGNAME=root",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "USER=root",
    ]


async def test_another_user_has_its_own_home(box: Box) -> None:
    result = await box.exec("id -un; echo $HOME $USER", user="nobody")
    assert result.text == "nobody\n/nonexistent nobody\n"


async def test_a_process_is_read_as_it_goes(box: Box) -> None:
    process = await box.start("while read line; do echo got $line; done")
    chunks = process.output()
    await process.write_stdin(b"one\n")
    assert await anext(chunks) == ("stdout", b"got one\n")
    await process.close_stdin()
    assert (await process.wait()).exit_code == 0


async def test_a_time_out_kills_all_and_keeps_the_output(box: Box) -> None:
    result = await box.exec("echo before; setsid sleep 1000 & trap '' TERM; sleep 1000", timeout_s=0.3)
    assert (result.timed_out, result.reason, result.text) == (True, EndReason.EXEC_TIMEOUT, "before\n")
    assert (await box.exec("ls -d /proc/[0-9]* | wc -l")).text.strip() <= "5"


# --- limits, by exceeding each --------------------------------------------------------------------------------------


async def test_memory(edge: Edge) -> None:
    box = await edge.create(small(resources=limited(memory_mb=48, disk_mb=8)))
    result = await box.exec(["python3", "-c", "x = bytearray(200 << 20)"])
    assert result.reason is EndReason.OOM
    assert (await box.exec("echo alive")).text == "alive\n"
    assert (await box.stats()).oom_kills >= 1


async def test_processes(edge: Edge) -> None:
    box = await edge.create(small(resources=limited(pids=10)))
    result = await box.exec("for i in $(seq 30); do sleep 5 & done; wait")
    assert result.reason is EndReason.PIDS
    assert (await box.stats()).pids_refused >= 1


@pytest.mark.parametrize("driver", ["memory", "loop"])
async def test_disk_bytes(edge: Edge, driver: str) -> None:
    box = await edge.create(small(resources=limited(disk_mb=16, disk_driver=driver)))
    result = await box.exec("head -c 64M /dev/zero > /root/big")
    assert result.reason is EndReason.DISK
    assert (await box.stats()).disk_bytes <= 16 << 20
    assert (await box.exec("rm /root/big && echo ok")).text == "ok\n"


@pytest.mark.parametrize("driver", ["memory", "loop"])
async def test_disk_files(edge: Edge, driver: str) -> None:
    box = await edge.create(small(resources=limited(disk_inodes=300, disk_driver=driver)))
    result = await box.exec("cd /root; for i in $(seq 1000); do : > f$i || exit 1; done")
    assert result.reason is EndReason.DISK


async def test_a_full_disk_in_memory_leaves_memory_to_work_with(edge: Edge) -> None:
    box = await edge.create(small(resources=limited(memory_mb=64, disk_mb=64)))
    assert (await box.exec("head -c 200M /dev/zero > /root/big")).reason is EndReason.DISK
    assert (await box.exec(["python3", "-c", "import os; os.remove('/root/big'); print('room')"])).text == "room\n"


async def test_cpu(edge: Edge) -> None:
    box = await edge.create(small(resources=limited(cpus=0.2)))
    await box.exec(["timeout", "0.6", "sh", "-c", "while :; do :; done"])
    assert (await box.stats()).cpu_s < 0.4


async def test_an_ordinary_failure_has_no_reason(box: Box) -> None:
    assert (await box.exec("exit 7")).reason is None
    killed = await box.exec("kill -9 $$")
    assert (killed.signal, killed.reason) == (signal.SIGKILL, None)


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_a_lost_guest_ends_the_sandbox_and_its_commands(box: Box) -> None:
    process = await box.start("sleep 100")
    assert box._live is not None
    os.kill(box._live.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost, match="GUEST_LOST"):
        await process.wait()
    assert box.ended is EndReason.GUEST_LOST
    with pytest.raises(SandboxLost, match="GUEST_LOST"):
        await box.exec(["true"])


# --- layers ---------------------------------------------------------------------------------------------------------


async def change(box: Box) -> None:
    result = await box.exec(
        "echo new > /root/new; echo changed >> /etc/passwd; rm /etc/group; mkdir -p /a/b; : > /a/b/c"
    )
    assert result.ok, result.error_text


async def test_diff_lists_what_was_done_and_nothing_else(box: Box) -> None:
    assert await box.diff() == []
    await change(box)
    assert [(entry.path, entry.change, entry.kind) for entry in await box.diff()] == [
        ("/a", "added", "dir"),
        ("/a/b", "added", "dir"),
        ("/a/b/c", "added", "file"),
        ("/etc/group", "deleted", "file"),
        ("/etc/passwd", "modified", "file"),
        ("/root/new", "added", "file"),
    ]


async def test_a_directory_made_anew_hides_the_old_one(box: Box) -> None:
    await box.exec("rm -r /etc/ssl && mkdir /etc/ssl && : > /etc/ssl/only")
    changes = {(entry.path, entry.change) for entry in await box.diff()}
    assert ("/etc/ssl/only", "added") in changes
    assert ("/etc/ssl/certs", "deleted") in changes


async def test_export_holds_the_same(box: Box, tmp_path: Path) -> None:
    await change(box)
    await box.export_diff(tmp_path / "diff.tar.zst")
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO((tmp_path / "diff.tar.zst").read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = set(tar.getnames())
        content = tar.extractfile("root/new")
        assert content is not None
        assert content.read() == b"new\n"
    assert {"a/b/c", "etc/.wh.group", "etc/passwd", "root/new"} <= names


@pytest.mark.parametrize("driver", ["memory", "loop"])
async def test_reset_drops_processes_and_changes(edge: Edge, driver: str) -> None:
    box = await edge.create(small(resources=limited(disk_driver=driver)))
    await change(box)
    await box.exec("sleep 1000 &", keep=True)
    await box.reset()
    assert await box.diff() == []
    assert (await box.exec("cat /root/new; pgrep -c sleep; test -e /etc/group && echo group")).text.split() == [
        "0",
        "group",
    ]
    assert (await box.receipt()).incarnation == 2


@pytest.mark.parametrize("driver", ["memory", "loop"])
async def test_snapshot_goes_on_above_and_can_be_used_by_others(edge: Edge, driver: str) -> None:
    box = await edge.create(small(resources=limited(disk_driver=driver)))
    await change(box)
    layer = await box.snapshot()
    assert layer.handle
    assert await box.diff() == []
    assert (await box.exec("cat /root/new; test -e /etc/group || echo no group")).text == "new\nno group\n"
    await box.exec("rm /root/new; mkdir -p /a/b/d")
    assert [(entry.path, entry.change) for entry in await box.diff()] == [("/a/b/d", "added"), ("/root/new", "deleted")]
    async with await edge.create(small(layers=(layer,))) as other:
        assert (await other.exec("cat /root/new")).text == "new\n"
        assert layer.handle in (await other.receipt()).layer_digests
    await box.reset()
    assert (await box.exec("ls /root; wc -l < /etc/group")).text != ""
    assert (await box.exec("test -e /root/new")).exit_code == 1


async def test_a_snapshot_outlives_its_sandbox_until_it_is_dropped(edge: Edge) -> None:
    box = await edge.create(small())
    await box.exec("echo kept > /root/kept")
    layer = await box.snapshot()
    await box.close()
    async with await edge.create(small(layers=(layer,))) as other:
        await edge.drop(layer)
        assert (await other.exec("cat /root/kept")).text == "kept\n"
    await until(lambda: not edge.boxes)
    with pytest.raises(RefusedError, match="not held"):
        await edge.create(small(layers=(layer,)))


async def test_forks_see_the_past_but_not_each_other(box: Box) -> None:
    await box.exec("echo past > /root/past; sleep 1000 &", keep=True)
    one, two = await box.fork(2)
    await one.exec("echo one > /root/mine")
    await two.exec("echo two > /root/mine")
    await box.exec("echo parent > /root/mine")
    answers = [(await each.exec("cat /root/past /root/mine; pgrep -c sleep")).text for each in (one, two, box)]
    assert answers == ["past\none\n0\n", "past\ntwo\n0\n", "past\nparent\n0\n"]
    await one.reset()
    assert (await one.exec("ls /root")).text == "past\n"


async def test_forks_outlive_a_reset_of_their_parent(box: Box) -> None:
    await box.exec("echo past > /root/past")
    (child,) = await box.fork()
    await box.reset()
    assert (await box.exec("ls /root")).text == ""
    assert (await child.exec("cat /root/past")).text == "past\n"
    await child.close()
    await until(lambda: not box._edge._frozen._layers)


async def test_a_command_that_a_reset_cuts_off_says_so(box: Box) -> None:
    process = await box.start("sleep 100")
    await box.reset()
    with pytest.raises(SandboxLost, match="reset"):
        await process.wait()
    assert (await box.exec(["true"])).ok


async def test_kill_all_leaves_the_guest_only(box: Box) -> None:
    await box.exec("sleep 1000 & setsid sleep 1000 &", keep=True)
    assert await box.kill_all() == 0
    assert (await box.exec("pgrep -c sleep")).text == "0\n"


async def test_bad_arguments_are_named(box: Box) -> None:
    with pytest.raises(ConfigError, match="count"):
        await box.fork(0)
    with pytest.raises(ConfigError, match="path"):
        await box.read("")
    with pytest.raises(ConfigError, match="path"):
        await box.read("a\0b")


async def test_the_receipt_tells_limits_peaks_and_mechanisms(edge: Edge) -> None:
    async with await edge.create(small(labels={"trial": "1"})) as box:
        await box.exec("head -c 4M /dev/zero > /root/f; sleep 0.01 & sleep 0.01 & wait")
    receipt = await box.receipt()
    assert receipt.image_digest.startswith("sha256:")
    assert receipt.limits["memory_mb"] == 64
    assert receipt.limit_mechanisms["memory"].startswith("cgroup v")
    assert receipt.peaks["disk_bytes"] >= 4 << 20
    assert receipt.peaks["memory_bytes"] > 4 << 20
    assert receipt.network == "none"
    assert receipt.labels == {"trial": "1"}
    assert receipt.ended_at is not None


# --- files ----------------------------------------------------------------------------------------------------------


async def test_files_are_written_read_listed_and_removed(box: Box) -> None:
    await box.write("/root/deep/er/file", b"\x00\xff content", mode=0o640)
    assert await box.read("/root/deep/er/file") == b"\x00\xff content"
    assert await box.read("/root/deep/er/file", max_bytes=2) == b"\x00\xff"
    (entry,) = await box.list("/root/deep/er")
    assert (entry.name, entry.kind, entry.size, entry.mode & 0o777) == ("file", "file", 10, 0o640)
    assert (await box.stat("/root/deep")).kind == "dir"
    await box.mkdir("/root/deep/other/dir")
    await box.remove("/root/deep", recursive=True)
    with pytest.raises(FileError) as missing:
        await box.read("/root/deep/er/file")
    assert missing.value.errno == errno.ENOENT


async def test_paths_that_are_not_absolute_begin_at_the_working_directory(edge: Edge) -> None:
    box = await edge.create(small(workdir="/tmp"))
    await box.write("name", b"x")
    assert await box.read("/tmp/name") == b"x"


@pytest.mark.parametrize("suffix", ["", ".tar", ".tar.gz", ".tar.zst"])
async def test_a_tree_goes_in_and_comes_out_the_same(box: Box, tmp_path: Path, suffix: str) -> None:
    tree = tmp_path / "tree"
    (tree / "sub/empty").mkdir(parents=True)
    (tree / "sub/run").write_text("#!/bin/sh\n")
    (tree / "sub/run").chmod(0o755)
    (tree / "link").symlink_to("sub/run")
    (tree / os.fsdecode(b"odd \xff\nname")).write_bytes(b"odd")
    source = pack(tree, suffix) if suffix else tree
    await box.upload(source, "/root/there")
    await box.download("/root/there", tmp_path / "back")
    assert listing(tmp_path / "back") == listing(tree)


async def test_one_file_goes_in_and_comes_out(box: Box, tmp_path: Path) -> None:
    (tmp_path / "tool").write_bytes(b"x" * 3_000_000)
    (tmp_path / "tool").chmod(0o750)
    await box.upload(tmp_path / "tool", "/root/bin/")
    assert (await box.exec(["stat", "-c", "%a %s %U", "/root/bin/tool"])).text == "750 3000000 root\n"
    await box.download("/root/bin/tool", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "tool").read_bytes()


async def test_an_upload_belongs_to_the_user_it_is_for(box: Box, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/file").write_text("x")
    await box.exec("mkdir -m 777 /shared")
    await box.upload(tmp_path / "dir", "/shared", user="nobody")
    assert (await box.exec(["stat", "-c", "%U", "/shared/file"])).text == "nobody\n"


def pack(tree: Path, suffix: str) -> Path:
    target = tree.with_name(tree.name + suffix)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz" if suffix == ".tar.gz" else "w") as tar:
        tar.add(tree, ".")
    raw = data.getvalue()
    target.write_bytes(zstandard.ZstdCompressor().compress(raw) if suffix == ".tar.zst" else raw)
    return target


def listing(root: Path) -> dict[str, tuple[str, object]]:
    found: dict[str, tuple[str, object]] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("dir", path.stat().st_mode)
        else:
            found[name] = ("file", (path.read_bytes(), path.stat().st_mode))
    return found


async def test_the_working_directory_is_there(edge: Edge) -> None:
    box = await edge.create(small(workdir="/somewhere/new"))
    assert (await box.exec("pwd")).text == "/somewhere/new\n"
    await box.reset()
    assert (await box.exec("pwd")).text == "/somewhere/new\n"


async def test_a_fork_without_room_changes_nothing(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    policy = Policy(cpu_overcommit=1.0)
    async with Edge(tmp_path, pool_size=1, policy=policy, queue_deadline_s=0.1) as edge:
        box = await edge.create(small(resources=limited(cpus=cores * 0.4)))
        await box.exec("sleep 1000 &", keep=True)
        with pytest.raises(RefusedError, match="no room"):
            await box.fork(2)
        assert (await box.exec("pgrep -c sleep")).text == "1\n"
        (child,) = await box.fork(1)
        assert (await child.exec(["true"])).ok


async def test_a_workdir_that_became_something_else_does_not_end_the_sandbox(edge: Edge) -> None:
    """Whoever is root inside can put a file in its place; snapshots are still taken, and commands say what is wrong."""
    async with await edge.create(small(workdir="/place")) as box:
        await box.exec("cd /; rm -r /place; echo > /place")
        await box.snapshot()
        assert (await box.exec("true")).exit_code == 126
        (child,) = await box.fork()
        async with child:
            assert (await child.exec("true", cwd="/")).ok
        await box.reset()
        assert (await box.exec("pwd")).text == "/place\n"


async def test_root_is_root_whatever_the_accounts_say(box: Box) -> None:
    """Otherwise whoever can write /etc/passwd could take commands and file operations away from the host."""
    for sabotage in ("mkfifo /etc/passwd /etc/group", "echo root:x:1000:1000::/:/bin/sh > /etc/passwd"):
        await box.exec(f"rm -f /etc/passwd /etc/group; {sabotage}")
        assert (await box.exec("id -u")).text == "0\n"
        await box.write("/root/file", b"x")
        assert await box.read("/root/file") == b"x"
