"""`proctor doctor`: what this machine can do, tier by tier, and what to install."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from proctor.sandbox.contract import Runtime

Status = Literal["ok", "missing"]
_OLDEST_KERNEL = (5, 19)
_KVM_GET_API_VERSION = 0xAE00
_KVM_API_VERSION = 12
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_KEYRING_REMEDY = "apt-get install --no-install-recommends debian-archive-keyring"
_CONTROLLERS = ("memory", "cpu", "pids", "freezer")


_OWN_WAYS = {"runsc": "scripts/setup --runtimes"}
# docker is of use only when its daemon answers.
_VERSION_ARGUMENTS = {"mkfs.ext4": ["-V"], "docker": ["version", "--format", "server {{.Server.Version}}"]}


@dataclass(frozen=True, slots=True)
class Check:
    """One fact about the machine: what was found, and what to do when it is not enough."""

    name: str
    status: Status
    detail: str
    remedy: str | None = None

    @property
    def ok(self) -> bool:
        """True when nothing has to be done."""
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class Tier:
    """One way to run sandboxes or to make images, and the checks that it depends on."""

    name: str
    purpose: str
    status: Status
    missing: tuple[str, ...]
    remedies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that doctor found."""

    version: int
    machine: dict[str, str]
    checks: tuple[Check, ...]
    tiers: tuple[Tier, ...]
    notes: tuple[str, ...] = field(default=())


RUNTIMES: tuple[Runtime, ...] = ("native", "runsc", "docker")

# Tier: (purpose, checks it needs).
_TIERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "container/native": (
        "sandboxes, default",
        ("linux", "root", "kernel", "namespaces", "overlay", "cgroups", "seccomp", "binary", "sandbox"),
    ),
    "container/runsc": ("sandboxes with gVisor", ("sandbox", "runsc", "sandbox in gVisor")),
    "container/docker": ("sandboxes where Docker is all there is", ("root", "docker engine", "sandbox in Docker")),
    "microvm": ("sandboxes with a kernel of their own", ("kvm", "firecracker or qemu")),
    "disk/loop": ("private disks larger than the memory limit", ("loop", "mkfs.ext4")),
    "image/host": ("the machine's own /usr, no download", ("merged usr",)),
    "image/debian": ("Debian releases", ("root", "mmdebstrap", "debian keys")),
    "image/dockerfile": ("environment/Dockerfile", ("root", "buildah")),
    "image/registry": ("docker://… references", ("root", "skopeo")),
}
_LATER = ("microvm",)
# Program: the package that has it on Debian and Ubuntu (None: not packaged there).
_PROGRAMS: dict[str, str | None] = {
    "mmdebstrap": "mmdebstrap",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "mkfs.ext4": "e2fsprogs",
    "docker": "docker.io",
    "podman": "podman",
    "crun": "crun",
    "bwrap": "bubblewrap",
    "runsc": None,
    "firecracker": None,
    "qemu-system-x86_64": "qemu-system-x86",
    "git": "git",
}


def check_kernel(release: str) -> Check:
    """Idmapped mounts and the mount API that the launcher uses came with Linux 5.12; overlay over them with 5.19."""
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _OLDEST_KERNEL:
        return Check("kernel", "missing", release, "a kernel of 5.19 or newer (overlays over idmapped mounts)")
    return Check("kernel", "ok", release)


def check_namespaces(proc: Path = Path("/proc")) -> Check:
    """All seven kinds, and permission to make user namespaces."""
    kinds = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
    missing = [kind for kind in kinds if not os.path.lexists(proc / "self" / "ns" / kind)]
    if missing:
        return Check("namespaces", "missing", f"no {', '.join(missing)} namespaces", "a kernel built with them")
    limit = _read(proc / "sys/user/max_user_namespaces")
    if limit == "0":
        return Check(
            "namespaces", "missing", "user namespaces are switched off", "sysctl user.max_user_namespaces=10000"
        )
    return Check("namespaces", "ok", f"{', '.join(kinds)}; at most {limit or 'unknown'} user namespaces")


def check_overlay(proc: Path = Path("/proc")) -> Check:
    """overlayfs, built in or already loaded."""
    if re.search(r"^nodev\toverlay$", _read(proc / "filesystems") or "", re.MULTILINE):
        return Check("overlay", "ok", "overlay in /proc/filesystems")
    return Check("overlay", "missing", "no overlay in /proc/filesystems", "modprobe overlay")


def check_cgroups(mounts: str, root: Path = Path("/")) -> Check:
    """A v2 hierarchy that has the controllers, or v1 hierarchies for them (hybrid mode counts as v1)."""
    v1: dict[str, str] = {}
    v2 = None
    for line in mounts.splitlines():
        _, where, kind, options, *_ = [*line.split(" "), "", "", "", ""]
        if kind == "cgroup":
            v1.update({name: where for name in options.split(",") if name in _CONTROLLERS})
        elif kind == "cgroup2":
            v2 = where
    available = (_read(root / (v2 or "").lstrip("/") / "cgroup.controllers") or "").split() if v2 else []
    if v2 and {"memory", "cpu", "pids"} <= set(available):
        return Check("cgroups", "ok", f"v2 at {v2} with {', '.join(available)}")
    lacking = [name for name in _CONTROLLERS if name not in v1]
    if not lacking:
        return Check("cgroups", "ok", f"v1{' (hybrid)' if v2 else ''}: {', '.join(sorted(v1))}")
    return Check("cgroups", "missing", f"no controller for {', '.join(lacking)}", "mount them, or boot with cgroup v2")


def check_seccomp(proc: Path = Path("/proc")) -> Check:
    """System call filters."""
    actions = _read(proc / "sys/kernel/seccomp/actions_avail")
    if actions and "errno" in actions:
        return Check("seccomp", "ok", actions)
    return Check("seccomp", "missing", "no seccomp filters", "a kernel with CONFIG_SECCOMP_FILTER")


def check_kvm(device: Path = Path("/dev/kvm")) -> Check:
    """/dev/kvm answers with the stable API version (12 since Linux 2.6.22)."""
    try:
        handle = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return Check("kvm", "missing", f"{device}: {error.strerror}", "a machine or VM with (nested) virtualisation")
    try:
        version = fcntl.ioctl(handle, _KVM_GET_API_VERSION)
    except OSError as error:
        return Check("kvm", "missing", f"{device}: {error.strerror}", "a machine or VM with (nested) virtualisation")
    finally:
        os.close(handle)
    if version != _KVM_API_VERSION:
        return Check("kvm", "missing", f"API version {version}", "a kernel with KVM API version 12")
    return Check("kvm", "ok", f"{device}, API version {version}")


def check_program(name: str, package: str | None) -> Check:
    """A program and its version."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        remedy = (
            f"apt-get install --no-install-recommends {package}"
            if package
            else _OWN_WAYS.get(name, f"install {name} from its project")
        )
        return Check(name, "missing", "not installed", remedy)
    arguments = _VERSION_ARGUMENTS.get(name, ["--version"])
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, "missing", f"{path} does not run: {error}", f"reinstall {package or name}")
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode != 0:
        detail = lines[-1] if lines else f"exit code {done.returncode}"
        return Check(name, "missing", f"{path}: {detail}", f"start the {name} daemon" if name == "docker" else None)
    return Check(name, "ok", f"{path}: {lines[0] if lines else 'no version'}")


def check_sandbox(runtime: Runtime = "native", name: str = "sandbox") -> Check:
    """Make a sandbox of the host image, run `true` in it, close it."""
    import anyio

    from proctor.common import ProctorError

    async def probe() -> float:
        from proctor import sandbox

        async with sandbox.create(sandbox.SandboxSpec(image="host", runtime=runtime)) as box:
            start = time.perf_counter()
            result = await box.exec(["true"], timeout_s=20)
            if not result.ok:
                raise ProctorError(f"`true` ended with {result.exit_code}, {result.reason}")
            return time.perf_counter() - start

    try:
        seconds = anyio.run(probe)
    except (ProctorError, OSError) as error:
        return Check(name, "missing", f"a trial sandbox failed: {error}", "put the other checks right first")
    return Check(name, "ok", f"a trial sandbox ran `true` in {seconds * 1000:.1f} ms")


def _either(name: str, checks: dict[str, Check], *names: str) -> Check:
    present = [checks[item] for item in names if checks[item].ok]
    if present:
        return Check(name, "ok", "; ".join(item.detail for item in present))
    return Check(name, "missing", "none is installed", checks[names[-1]].remedy or checks[names[0]].remedy)


def _simple(name: str, good: bool, detail: str, otherwise: str, remedy: str) -> Check:
    return Check(name, "ok", detail) if good else Check(name, "missing", otherwise, remedy)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def diagnose(*, live: bool = True) -> Diagnosis:
    """Look at everything; `live` also makes a real sandbox."""
    merged = os.path.islink("/bin") and os.readlink("/bin").lstrip("/") == "usr/bin"
    binary = Path(__file__).parent.parent / "sandbox" / "_bin" / "proctor-init"
    found = [
        _simple("linux", platform.system() == "Linux", "Linux", platform.system(), "Linux, or a Linux VM"),
        _simple("root", os.geteuid() == 0, "running as root", f"uid {os.geteuid()}", "run as root (sudo)"),
        check_kernel(platform.release()),
        check_namespaces(),
        check_overlay(),
        check_cgroups(_read(Path("/proc/mounts")) or ""),
        check_seccomp(),
        _simple("binary", os.access(binary, os.X_OK), str(binary), "not compiled", "scripts/setup, or scripts/build-c"),
        _simple("loop", Path("/dev/loop-control").exists(), "/dev/loop-control", "no loop devices", "modprobe loop"),
        _simple("merged usr", merged, "/bin is usr/bin", "/bin is not a link", "proctor image build debian:bookworm"),
        _simple("debian keys", _KEYRING.is_file(), str(_KEYRING), f"no {_KEYRING}", _KEYRING_REMEDY),
        check_kvm(),
        *(check_program(name, package) for name, package in _PROGRAMS.items()),
    ]
    checks = {check.name: check for check in found}
    checks["docker engine"] = _engine()
    checks["firecracker or qemu"] = _either("firecracker or qemu", checks, "firecracker", "qemu-system-x86_64")
    checks["sandbox"] = _native(checks, live=live)
    checks["sandbox in gVisor"] = _other(checks, "runsc", "sandbox in gVisor", ("sandbox", "runsc"), live=live)
    checks["sandbox in Docker"] = _other(checks, "docker", "sandbox in Docker", ("docker engine",), live=live)
    notes = (f"this version of Proctor does not run {' nor '.join(_LATER)} yet",)
    machine = {"system": _system_name(), "kernel": platform.release(), "architecture": platform.machine()}
    return Diagnosis(1, machine, tuple(checks.values()), tuple(_tier(name, checks) for name in _TIERS), notes)


def _native(checks: dict[str, Check], *, live: bool) -> Check:
    if not all(checks[name].ok for name in _TIERS["container/native"][1] if name != "sandbox"):
        return Check("sandbox", "missing", "not tried", "put the other checks right first")
    return check_sandbox() if live else Check("sandbox", "ok", "not tried (--no-probe)")


def _other(checks: dict[str, Check], runtime: Runtime, name: str, needs: tuple[str, ...], *, live: bool) -> Check:
    if not all(checks[one].ok for one in needs):
        return Check(name, "missing", "not tried")
    return check_sandbox(runtime, name) if live else Check(name, "ok", "not tried (--no-probe)")


def _engine() -> Check:
    """The Docker Engine's socket. Podman's is another one, and is not tried."""
    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if host.startswith("unix://") and Path(host.removeprefix("unix://")).is_socket():
        return Check("docker engine", "ok", host)
    return Check("docker engine", "missing", f"nothing at {host}", "start a Docker Engine, or set DOCKER_HOST")


def _tier(name: str, checks: dict[str, Check]) -> Tier:
    purpose, needs = _TIERS[name]
    missing = [checks[item] for item in needs if not checks[item].ok]
    remedies = dict.fromkeys(item.remedy for item in missing if item.remedy)
    return Tier(name, purpose, "missing" if missing else "ok", tuple(item.name for item in missing), tuple(remedies))


def _system_name() -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', _read(Path("/etc/os-release")) or "", re.MULTILINE)
    return match[1] if match else platform.platform()


def native_works(diagnosis: Diagnosis) -> bool:
    """True when the default backend can be used."""
    return any(tier.name == "container/native" and tier.status == "ok" for tier in diagnosis.tiers)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--no-probe", is_flag=True, help="Do not make a sandbox to try it.")
@click.option("-v", "--verbose", is_flag=True, help="Show every check.")
@click.option("--tools", is_flag=True, help="Check the agents' tools in an image instead.")
@click.option("--image", metavar="REF", default="host", show_default=True, help="With --tools: in which image.")
@click.option(
    "--agent",
    "agents",
    metavar="NAME",
    multiple=True,
    help="With --tools: a command-line agent, too.",
)
@click.option("--conformance", is_flag=True, help="Run the conformance suite on the runtimes that work here instead.")
@click.option("--isolation", is_flag=True, help="Run the isolation self-test on the runtimes that work here instead.")
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    type=click.Choice(RUNTIMES),
    help="With --conformance or --isolation: only on this one.",
)
@click.option("--capabilities", is_flag=True, help="Print what each runtime can do, as a Markdown table, instead.")
@click.pass_context
def doctor(
    ctx: click.Context,
    as_json: bool,
    no_probe: bool,
    verbose: bool,
    tools: bool,
    image: str,
    agents: tuple[str, ...],
    conformance: bool,
    isolation: bool,
    runtimes: tuple[Runtime, ...],
    capabilities: bool,
) -> None:
    """What this machine can do, tier by tier, and what to install.

    Exit code 0 if sandboxes of the default kind (container/native) work here, else 1. With --tools: 0 if every tool
    does what it should in the image, else 1. With --conformance: 0 if every check passed on every runtime that was
    asked for (on those that work here, if none was), else 1. With --isolation: 0 if no item of the self-test is red.
    """
    if (agents and not tools) or (image != "host" and not tools):
        raise click.UsageError("--image and --agent go with --tools")
    if runtimes and not (conformance or isolation):
        raise click.UsageError("--runtime goes with --conformance or --isolation")
    if isolation:
        from proctor.cli import _isolation

        ctx.exit(0 if _isolation.examine(runtimes, RUNTIMES, as_json=as_json) else 1)
    if tools:
        from proctor.cli import _tools

        ctx.exit(_tools.run(image, agents, as_json=as_json))
    if capabilities:
        from proctor.sandbox.runtimes.capabilities import table

        click.echo(table(), nl=False)
        return
    if conformance:
        from proctor.cli._conformance import examine

        ctx.exit(0 if examine(runtimes, as_json=as_json) else 1)
    diagnosis = diagnose(live=not no_probe)
    if as_json:
        click.echo(json.dumps(asdict(diagnosis)))
    else:
        _print(diagnosis, verbose)
    ctx.exit(0 if native_works(diagnosis) else 1)


def _print(diagnosis: Diagnosis, verbose: bool) -> None:
    click.echo(", ".join(diagnosis.machine.values()))
    width = max(len(tier.name) for tier in diagnosis.tiers)
    for tier in diagnosis.tiers:
        mark = click.style("ok     ", fg="green") if tier.status == "ok" else click.style("missing", fg="yellow")
        click.echo(f"  {mark}  {tier.name:<{width}}  {tier.purpose}")
        if tier.missing:
            click.echo(f"           {'':<{width}}  lacks {', '.join(tier.missing)}: {'; '.join(tier.remedies)}")
    if verbose or not native_works(diagnosis):
        click.echo("")
        for check in diagnosis.checks:
            click.echo(f"  {check.status:<7}  {check.name}: {check.detail}")
    for note in diagnosis.notes:
        click.echo(f"note: {note}")
