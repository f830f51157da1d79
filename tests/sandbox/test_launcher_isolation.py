"""What root inside a sandbox can see, touch and break: each hardening step, tested from inside.

The list follows the identity, namespace and mount items of the isolation checklist; each test fails without its step.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox.native.plan import DEFAULT_CAPABILITIES, Bind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.sandbox.native.launcher import Launcher

    from .conftest import MakeRoom, Room

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


@pytest.fixture
async def room(make_room: MakeRoom) -> AsyncIterator[Room]:
    async with make_room() as room:
        yield room


# --- identity and privilege -----------------------------------------------------------------------------------------


async def test_root_is_an_unprivileged_id_outside(room: Room) -> None:
    result = await room.sh("id -u; cat /proc/self/uid_map /proc/self/gid_map")
    words = result.text.split()
    base = str(room.launched.uid_base)
    assert words == ["0", "0", base, "65536", "0", base, "65536"]
    assert room.launched.uid_base >= 65536


async def test_every_sandbox_has_its_own_ids(make_room: MakeRoom) -> None:
    async with make_room() as one, make_room() as two:
        assert abs(one.launched.uid_base - two.launched.uid_base) >= 65536


def _host_ids(pid: int) -> dict[str, list[int]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line[:3]: [int(word) for word in line.split()[1:]] for line in lines if line.startswith(("Uid:", "Gid:"))}


async def test_every_guest_has_an_id_that_no_sandbox_has(make_room: MakeRoom) -> None:
    async with make_room() as one, make_room() as two:
        guests = [_host_ids(room.launched.pid) for room in (one, two)]
        for ids in guests:
            assert len(set(ids["Uid"])) == 1
            assert ids["Gid"] == ids["Uid"]
            assert 65536 <= ids["Uid"][0] < min(one.launched.uid_base, two.launched.uid_base)
        assert guests[0]["Uid"] != guests[1]["Uid"]


_FILL_QUEUES = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
attributes = (ctypes.c_long * 8)(0, 10, 8192)
made = 0
while made < 1000 and libc.mq_open(b"/q%d" % made, 0o102, 0o600, attributes) >= 0: made += 1
print(made)
"""


async def test_no_sandbox_uses_up_the_kernels_allowances_of_another(make_room: MakeRoom) -> None:
    async with make_room() as one, make_room() as two:
        first = (await one.python(_FILL_QUEUES)).text
        second = (await two.python(_FILL_QUEUES)).text
        assert int(first) > 0
        assert first == second


async def test_files_made_by_root_inside_are_stored_as_root_and_owned_outside_the_mount(room: Room) -> None:
    await room.sh("echo x > /tmp/file; chown 1000:1000 /tmp/file; echo y > /tmp/second")
    upper = Path(f"/proc/self/fd/{room.launched.upper_fd}/upper/tmp")
    assert (upper / "file").stat().st_uid == 1000
    assert (upper / "second").stat().st_uid == 0


async def test_capabilities_are_exactly_the_declared_ones(room: Room) -> None:
    result = await room.sh("grep ^Cap /proc/self/status")
    found = dict(line.split(":\t") for line in result.text.splitlines())
    declared = f"{DEFAULT_CAPABILITIES:016x}"
    nothing = f"{0:016x}"
    assert found == {
        "CapInh": nothing,
        "CapPrm": declared,
        "CapEff": declared,
        "CapBnd": declared,
        "CapAmb": nothing,
    }


async def test_no_new_privileges_and_seccomp_are_on(room: Room) -> None:
    result = await room.sh("grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status")
    assert result.text.split() == ["NoNewPrivs:", "1", "Seccomp:", "2"]


async def test_a_setuid_program_gains_nothing(room: Room) -> None:
    result = await room.sh(
        "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id && setpriv --reuid 1000 --regid 1000 --clear-groups /tmp/id -u"
    )
    assert result.text.strip() == "1000"


async def test_a_chosen_capability_mask_is_honoured(make_room: MakeRoom) -> None:
    async with make_room(capabilities=1 << 0 | 1 << 6 | 1 << 7) as room:
        result = await room.sh("grep ^CapBnd /proc/self/status")
        assert result.text.split()[1] == f"{1 << 0 | 1 << 6 | 1 << 7:016x}"


# --- process 1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mem", "environ", "maps", "cwd", "root", "exe", "fd", "auxv", "syscall", "stack", "ns/mnt"]
)
async def test_process_1_cannot_be_looked_into(room: Room, name: str) -> None:
    result = await room.python(
        f"""
import os
path = "/proc/1/{name}"
try:
    os.readlink(path) if path.endswith(("cwd", "root", "exe", "mnt")) else (
        os.listdir(path) if path.endswith("fd") else open(path, "rb").read(1))
    print("read")
except PermissionError:
    print("denied")
"""
    )
    assert result.text.strip() == "denied"


async def test_process_1_cannot_be_signalled_traced_or_limited(room: Room) -> None:
    result = await room.python(
        """
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
print("ptrace", libc.ptrace(16, 1, 0, 0))
try: resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1)); print("prlimit")
except PermissionError: pass
try: os.sched_setaffinity(1, {0}); print("affinity")
except PermissionError: pass
try: os.setpriority(os.PRIO_PROCESS, 1, 10); print("priority")
except PermissionError: pass
try: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)); print("scheduler")
except PermissionError: pass
print("oom", end=" ")
try: open("/proc/1/oom_score_adj", "w").write("1000"); print("written")
except OSError: print("denied")
"""
    )
    assert result.text.split() == ["ptrace", "-1", "oom", "denied"]
    assert (await room.sh("echo alive")).text == "alive\n"


async def test_process_1_tells_nothing_of_the_host(room: Room) -> None:
    result = await room.sh("tr '\\0' ' ' < /proc/1/cmdline; cat /proc/1/comm")
    assert result.text.split() == ["proctor-init", "proctor-guest"]


async def test_the_guest_has_no_core_limit_and_commands_inherit_it(room: Room) -> None:
    assert (await room.sh("ulimit -c; ulimit -Hc")).text.split() == ["0", "0"]


# --- namespaces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"])
async def test_each_namespace_is_its_own(room: Room, kind: str) -> None:
    inside = (await room.sh(f"readlink /proc/self/ns/{kind}")).text.strip()
    assert re.fullmatch(rf"{kind}:\[\d+\]", inside)
    assert inside != os.readlink(f"/proc/self/ns/{kind}")


async def test_the_hostname_is_the_plans(make_room: MakeRoom) -> None:
    async with make_room(hostname="exam-room") as room:
        assert (await room.sh("uname -n")).text == "exam-room\n"


async def test_cgroup_paths_are_those_of_the_sandbox(room: Room) -> None:
    lines = (await room.sh("cat /proc/1/cgroup")).text.splitlines()
    assert lines
    assert {line.split(":")[2] for line in lines} <= {"/"}


async def test_loopback_is_the_only_device_and_it_works(room: Room) -> None:
    result = await room.python(
        """
import os, socket
print(*[name for _, name in socket.if_nameindex()])
server = socket.create_server(("127.0.0.1", 80))
client = socket.create_connection(("127.0.0.1", 80))
print("connected")
try: socket.create_connection(("192.0.2.1", 80), 1); print("routed")
except OSError as error: print(error.errno)
"""
    )
    assert result.text.split() == ["lo", "connected", "101"]


async def test_ping_works_without_privilege(room: Room) -> None:
    program = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP); s.settimeout(5)
s.sendto(bytes([8, 0, 0, 0, 0, 0, 0, 1]), ("127.0.0.1", 0)); print(s.recv(64)[0])
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); print("raw")
except PermissionError: print("no raw sockets")
"""
    result = await room.python(program, user="1000:1000")
    assert result.text.splitlines() == ["0", "no raw sockets"]


async def test_abstract_sockets_of_the_machine_are_out_of_reach(room: Room) -> None:
    name = f"\0proctor-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        result = await room.python(f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})")
    assert "ConnectionRefusedError" in result.error_text


async def test_sandboxes_do_not_see_each_other(make_room: MakeRoom) -> None:
    server = """
import socket, time
tcp = socket.create_server(("127.0.0.1", 8080))
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0sibling"); abstract.listen()
open("/tmp/ready", "w").close(); time.sleep(30)
"""
    client = """
import glob, socket
for family, address in ((socket.AF_INET, ("127.0.0.1", 8080)), (socket.AF_UNIX, "\\0sibling")):
    try: socket.socket(family).connect(address); print("connected")
    except ConnectionRefusedError: print("refused")
print(sum(open(path).read() == "python3\\n" for path in glob.glob("/proc/[0-9]*/comm")))
"""
    async with make_room() as one, make_room() as two:
        await one.channel.start(["/usr/bin/python3", "-c", server], env={})
        while not (await one.sh("test -e /tmp/ready")).ok:
            pass
        assert (await two.python(client)).text.split() == ["refused", "refused", "1"]


async def test_the_network_cannot_be_changed(room: Room) -> None:
    program = """
import fcntl, socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for name, number in (("down", 0x8914), ("address", 0x8916), ("mtu", 0x8922)):
    try: fcntl.ioctl(s, number, struct.pack("16sH14x", b"lo", 0)); print(name)
    except PermissionError: print("refused")
"""
    assert (await room.python(program)).text.split() == ["refused"] * 3


async def test_an_open_network_is_the_machines(make_room: MakeRoom) -> None:
    async with make_room(network="open") as room:
        assert (await room.sh("readlink /proc/self/ns/net")).text.strip() == os.readlink("/proc/self/ns/net")


# --- mounts and devices ---------------------------------------------------------------------------------------------


async def test_mountinfo_tells_nothing_of_the_host(room: Room, base_layer: Path) -> None:
    text = (await room.sh("cat /proc/self/mountinfo")).text
    roots = {fields[4]: fields[3] for fields in (line.split() for line in text.splitlines())}
    assert str(base_layer) not in text
    assert "lowerdir=/" not in text
    assert roots.pop("/usr") == "/usr"
    ours = {"/", "/empty", "/null", "/sys", "/bus", "/fs", "/irq"}
    assert set(roots.values()) <= ours


async def test_every_mount_is_nosuid_and_nodev_where_it_can_be(room: Room) -> None:
    lines = [line.split() for line in (await room.sh("cat /proc/self/mounts")).text.splitlines()]
    assert all("nosuid" in fields[3].split(",") for fields in lines)
    with_devices = {fields[1] for fields in lines if "nodev" not in fields[3].split(",")}
    # /dev itself, its terminals, and the /dev/null that masks files of /proc.
    assert {path for path in with_devices if not path.startswith("/proc/")} == {"/dev", "/dev/pts"}


async def test_what_needs_no_writing_is_mounted_read_only(room: Room) -> None:
    lines = [line.split() for line in (await room.sh("cat /proc/self/mounts")).text.splitlines()]
    writable = {fields[1] for fields in lines if "ro" not in fields[3].split(",")}
    assert writable == {"/", "/proc", "/dev/pts", "/dev/shm"}
    read_only = {fields[1] for fields in lines} - writable
    there = {f"/proc/{name}" for name in {"sys", "bus", "fs", "irq"} & set(os.listdir("/proc"))}
    assert read_only >= there | {"/dev", "/sys", "/usr"}


async def test_propagation_is_private(room: Room) -> None:
    assert "shared:" not in (await room.sh("cat /proc/self/mountinfo")).text
    assert "master:" not in (await room.sh("cat /proc/self/mountinfo")).text


@pytest.mark.parametrize(
    "name",
    [
        "kcore",
        "kallsyms",
        "keys",
        "key-users",
        "timer_list",
        "kpagecgroup",
        "kpagecount",
        "kpageflags",
        "kmsg",
        "iomem",
    ],
)
async def test_masked_files_of_proc_are_empty(room: Room, name: str) -> None:
    if name not in os.listdir("/proc"):
        pytest.skip(f"this kernel has no /proc/{name}")
    result = await room.sh(f"cat /proc/{name} | wc -c")
    assert result.text.strip() == "0"


async def test_masked_directories_of_proc_are_empty(room: Room) -> None:
    result = await room.sh("for d in acpi asound scsi; do [ ! -e /proc/$d ] || ls -A /proc/$d; done")
    assert result.text == ""


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/shmmax",
        "/proc/sys/user/max_user_namespaces",
        "/proc/sys/net/ipv4/ip_unprivileged_port_start",
        "/proc/sysrq-trigger",
        "/proc/irq/default_smp_affinity",
    ],
)
async def test_kernel_settings_cannot_be_written(room: Room, path: str) -> None:
    result = await room.sh(f"[ ! -e {path} ] || {{ echo 1 > {path}; }} 2>/dev/null && [ -e {path} ] && echo written")
    assert "written" not in result.text or path == "/proc/sysrq-trigger"  # masked by /dev/null, which takes anything


async def test_sys_is_an_empty_read_only_directory(room: Room) -> None:
    result = await room.sh("ls -A /sys; mkdir /sys/x 2>/dev/null || echo refused; rmdir /sys/x 2>/dev/null")
    assert result.text == "refused\n"


async def test_dev_holds_exactly_the_harmless_devices(room: Room) -> None:
    names = (await room.sh("ls -A /dev")).text.split()
    assert names == sorted(
        [
            "fd",
            "full",
            "mqueue",
            "null",
            "ptmx",
            "pts",
            "random",
            "shm",
            "stderr",
            "stdin",
            "stdout",
            "tty",
            "urandom",
            "zero",
        ]
    )
    result = await room.sh("head -c 3 /dev/urandom | wc -c; echo x > /dev/null && head -c 2 /dev/zero | od -An -tx1")
    assert result.text.split() == ["3", "00", "00"]


async def test_pseudo_terminals_work(room: Room) -> None:
    result = await room.python("import os; m, s = os.openpty(); print(os.ttyname(s), os.stat(os.ttyname(s)).st_gid)")
    assert result.text.split() == ["/dev/pts/0", "5"]


@pytest.mark.parametrize("node", ["b 8 0", "c 1 1", "c 10 229", "c 1 3", "c 0 0"])
async def test_device_nodes_cannot_be_made(room: Room, node: str) -> None:
    result = await room.sh(f"mknod /tmp/node {node}")
    assert result.exit_code != 0
    assert (await room.sh("mkfifo /tmp/fifo && echo made")).text == "made\n"


_AS_ROOT_OF_THE_MACHINE = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
for name in "null", "zero", "full", "random", "urandom", "ptmx", "kmsg", "loop-control":
    path = f"/dev/{name}"
    try: os.close(os.open(path, os.O_RDWR)); print(path)
    except PermissionError: pass
for kind, number in ((0o060000, (8, 0)), (0o020000, (1, 3))):
    try: os.mknod(sys.argv[2], kind | 0o600, os.makedev(*number)); print("made", number)
    except PermissionError: pass
"""


async def test_even_the_machines_root_would_be_held_by_the_device_filter(room: Room, tmp_path: Path) -> None:
    if room.launched.facts["devices"] != "filtered":
        pytest.skip("this machine does not let a cgroup have a device filter")
    command = [sys.executable, "-c", _AS_ROOT_OF_THE_MACHINE, room.group.unified / "cgroup.procs", tmp_path / "node"]
    result = await anyio.run_process(command, stderr=None)
    expected = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/ptmx"
    assert result.stdout.decode().split() == expected.split()


async def test_nothing_can_be_mounted_or_unmounted(room: Room) -> None:
    result = await room.sh(
        "for c in 'mount -t tmpfs x /tmp' 'mount --bind /etc /tmp' 'umount /proc/keys' 'umount /dev' "
        "'mount -o remount,rw /proc/sys' 'pivot_root / /tmp'; do $c 2>/dev/null && echo \"$c\"; done; true"
    )
    assert result.text == ""


async def test_read_only_binds_cannot_be_written(room: Room) -> None:
    # Nothing here hurts the machine, whose own /usr this is, should the bind be writable after all.
    result = await room.sh("touch /usr/x; chmod 755 /usr/bin/env; ln /usr/bin/env /usr/x; mkdir /usr/x; echo done")
    assert result.text == "done\n"
    assert result.error_text.count("Read-only file system") == 4


async def test_overlay_attributes_cannot_be_forged(room: Room) -> None:
    result = await room.python(
        """
import os
for name in ("trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.x"):
    try: os.setxattr("/tmp", name, b"y"); print(name)
    except OSError: pass
"""
    )
    assert result.text == ""


async def test_no_descriptor_but_the_commands_own_is_inherited(room: Room) -> None:
    # 3 is the directory that ls itself has open.
    assert (await room.sh("ls /proc/self/fd")).text.split() == ["0", "1", "2", "3"]


async def test_the_environment_holds_nothing_of_the_host(room: Room) -> None:
    names = {line.split("=")[0] for line in (await room.sh("env")).text.splitlines()}
    assert names <= {"PATH", "HOME", "LC_ALL", "USER", "LOGNAME", "PWD", "SHLVL", "_", "OLDPWD"}


async def test_chroot_does_not_lead_out(room: Room) -> None:
    result = await room.python(
        """
import os
os.mkdir("/tmp/jail"); outside = os.open("/", os.O_RDONLY)
os.chroot("/tmp/jail"); os.fchdir(outside)
for _ in range(64): os.chdir("..")
os.chroot(".")
print(*sorted(os.listdir("/")))
"""
    )
    assert result.text.split() == sorted(
        ["bin", "dev", "etc", "lib", "lib64", "proc", "root", "sbin", "sys", "tmp", "usr"]
    )


async def test_new_namespaces_are_refused(room: Room) -> None:
    result = await room.sh("for f in -U -m -n -p -i -u -C; do unshare $f true 2>/dev/null && echo $f; done; true")
    assert result.text == ""


# --- binds and layers -----------------------------------------------------------------------------------------------


async def test_missing_mount_points_are_made_and_belong_to_root(make_room: MakeRoom, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("shown\n")
    binds = (Bind(Path("/usr"), "/usr"), Bind(tmp_path / "file", "/deep/er/file"), Bind(tmp_path, "/deep/dir"))
    async with make_room(binds=binds) as room:
        result = await room.sh("cat /deep/er/file /deep/dir/file; stat -c %u:%g /deep /deep/er")
        assert result.text.split() == ["shown", "shown", "0:0", "0:0"]


async def test_mount_points_below_links_of_the_image_are_made_where_they_lead(
    make_room: MakeRoom, base_layer: Path, tmp_path: Path
) -> None:
    layer = tmp_path / "linked"
    (layer / "var").mkdir(parents=True)
    (layer / "run").mkdir()
    (layer / "var/run").symlink_to("/run")
    (tmp_path / "shown").write_text("shown")
    binds = (Bind(Path("/usr"), "/usr"), Bind(tmp_path / "shown", "/var/run//service/file"))
    async with make_room(layers=(base_layer, layer), binds=binds) as room:
        assert (await room.sh("cat /run/service/file")).text == "shown"


async def test_a_bind_cannot_be_led_out_by_a_link_of_the_image(
    make_room: MakeRoom, base_layer: Path, tmp_path: Path
) -> None:
    layer = tmp_path / "hostile"
    layer.mkdir()
    (layer / "data").symlink_to("/../../../../root")
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown/x").write_text("x")
    binds = (Bind(Path("/usr"), "/usr"), Bind(tmp_path / "shown", "/data"))
    async with make_room(layers=(base_layer, layer), binds=binds) as room:
        # The link was followed inside the sandbox's own root.
        assert (await room.sh("ls /root")).text.split() == ["x"]


async def test_a_link_in_place_of_proc_is_refused(
    launcher: Launcher, make_room: MakeRoom, base_layer: Path, tmp_path: Path
) -> None:
    from proctor.sandbox.contract import LaunchError

    layer = tmp_path / "hostile"
    layer.mkdir()
    (layer / "proc").symlink_to("tmp")
    with pytest.raises(LaunchError, match="attach-proc"):
        async with make_room(layers=(base_layer, layer)):
            pass


async def test_layers_stack_in_order(make_room: MakeRoom, base_layer: Path, tmp_path: Path) -> None:
    for name in ("low", "high"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
        (tmp_path / name / name).write_text(name)
    async with make_room(layers=(base_layer, tmp_path / "low", tmp_path / "high")) as room:
        assert (await room.sh("cat /who /low /high")).text == "highlowhigh"


@pytest.mark.parametrize("forced", [False, True])
async def test_a_layer_given_as_descriptor_of_another_sandboxes_upper(
    make_room: MakeRoom, base_layer: Path, forced: bool
) -> None:
    async with make_room(force_paths=forced) as first:
        await first.sh("echo frozen > /tmp/file; rm /etc/group; chown 7:8 /tmp/file")
        upper = os.open(f"/proc/self/fd/{first.launched.upper_fd}/upper", os.O_RDONLY | os.O_DIRECTORY)
        try:
            async with make_room(layers=(base_layer, upper), force_paths=forced) as second:
                result = await second.sh("cat /tmp/file; stat -c %u:%g /tmp/file; ls /etc; echo changed > /tmp/file")
                assert result.text.split() == ["frozen", "7:8", "passwd"]
        finally:
            os.close(upper)
        assert (await first.sh("cat /tmp/file")).text == "frozen\n"


async def test_an_upper_that_must_stay_attached_goes_when_the_edge_closes_it(
    make_room: MakeRoom, launcher: Launcher
) -> None:
    def held() -> int:
        return Path(f"/proc/{launcher._process.pid}/mountinfo").read_text().count("/held")

    async def until_none() -> None:
        with anyio.fail_after(5):
            while held():  # noqa: ASYNC110
                await anyio.sleep(0.02)

    await until_none()
    async with make_room(force_paths=True):
        assert held() == 1
        await anyio.sleep(0.7)
        assert held() == 1
    await until_none()


async def test_layers_by_path_where_the_kernel_takes_no_descriptors(make_room: MakeRoom, base_layer: Path) -> None:
    async with make_room(force_paths=True) as room:
        assert room.launched.facts["overlay"] == "paths"
        result = await room.sh("echo x > /tmp/x && cat /tmp/x && cat /proc/self/mountinfo")
        assert result.text.startswith("x\n")
        assert str(base_layer) not in result.text
        assert "lowerdir=0," in result.text
