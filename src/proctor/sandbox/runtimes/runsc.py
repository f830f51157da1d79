"""Runtime `runsc`: gVisor inside a slot of our own launcher.

gVisor's sentry answers every system call of the sandbox, so the machine's kernel is out of its reach; and the sentry,
should it fall, finds itself where a native sandbox is: in namespaces, ids, control groups and a network of the slot.
Root, private upper, limits, counters, ties and clean-up are the launcher's (docs/design/runtimes.md).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import anyio

from proctor.common import InfraError, ProctorError, RefusedError
from proctor.sandbox.contract import Image, LaunchError, Layer, Lifecycle, Resources, SandboxSpec, Tier
from proctor.sandbox.native.guardfilter import RLIMIT_CORE, gvisor_program
from proctor.sandbox.native.launcher import BINARY
from proctor.sandbox.native.plan import DEFAULT_CAPABILITIES, Plan, Program
from proctor.sandbox.receipts import kernel
from proctor.sandbox.runtimes.contract import Order
from proctor.sandbox.runtimes.programs import ErrorLog, find_program

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox._incarnation import SlotIncarnation
    from proctor.sandbox.runtimes.native import NativeRuntime

log = logging.getLogger(__name__)

PLATFORMS: Final = ("systrap", "ptrace")
"""In the order of preference. `kvm` would need /dev/kvm, which a slot's unprivileged ids may not open."""

_GUEST = "/.proctor-init"
_PLACEHOLDER = "/tmp/.proctor-placeholder"
_PROBE_S = 20.0
_REMEDY = "scripts/setup --runtimes"
_HELLO_S = 30.0
# Names of DEFAULT_CAPABILITIES, and what only the guest has: to mount gVisor's counter of processes, to see marks.
_CAPABILITIES: Final = {
    0: "CAP_CHOWN",
    1: "CAP_DAC_OVERRIDE",
    3: "CAP_FOWNER",
    4: "CAP_FSETID",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    8: "CAP_SETPCAP",
    10: "CAP_NET_BIND_SERVICE",
    13: "CAP_NET_RAW",
    18: "CAP_SYS_CHROOT",
    21: "CAP_SYS_ADMIN",
    24: "CAP_SYS_RESOURCE",
    31: "CAP_SETFCAP",
}
_SENTRY_PIDS: Final = 128
"""Threads of the machine that the sentry and its gofer may have for themselves (about 35 when idle)."""
_PIDS_PER_PROCESS: Final = 4
"""Tasks of the machine for each process inside: what the sentry runs its code on (about three)."""
_OPEN_FILES: Final = 16_384


@dataclass(frozen=True, slots=True)
class Runsc:
    """An executable of gVisor that works here."""

    path: Path
    version: str
    platform: str


class RunscRuntime:
    """gVisor in the slots of one Edge's launcher."""

    def __init__(self, native: NativeRuntime, home: Path) -> None:
        self._native = native
        self._home = home
        self._runsc: Runsc | None = None

    @property
    def tier(self) -> Tier:
        """gVisor between the sandbox and the machine's kernel."""
        return Tier.GVISOR

    @property
    def kernel(self) -> str:
        """gVisor and its version, on the machine's kernel."""
        assert self._runsc is not None
        return f"gVisor {self._runsc.version} ({self._runsc.platform}) on {kernel()}"

    async def start(self) -> None:
        """Find gVisor and a platform on which it runs something here."""
        path = find_program("runsc", self._home)
        if path is None:
            raise RefusedError("runsc is not installed", field="runtime", remedy=_REMEDY)
        version = await anyio.to_thread.run_sync(_version, path)
        self._runsc = await self._probe(path, version)

    def disk_driver(self, resources: Resources) -> str:
        """As for native: the upper is the same."""
        return self._native.disk_driver(resources)

    async def launch(self, order: Order) -> SlotIncarnation:
        """Start gVisor in a slot, with the guest as its first process."""
        assert self._runsc is not None
        return await self._launch(order, self._runsc)

    async def _launch(self, order: Order, runsc: Runsc) -> SlotIncarnation:
        errors = ErrorLog(order.name)
        try:
            incarnation = await self._native.launch(order, lambda plan: _planned(plan, order, runsc, errors))
        except BaseException:
            errors.close()
            raise
        incarnation.log = errors
        incarnation.dies_of_pids = True
        incarnation.channel.hello_s = _HELLO_S
        incarnation.mechanisms = {
            **incarnation.mechanisms,
            "memory": f"{incarnation.mechanisms['memory']}, gVisor itself included; more ends the sandbox",
            "pids": f"gVisor's own; {_host_pids(order.spec.resources.pids)} tasks of the machine end the sandbox",
            "runsc": f"{runsc.version}, {runsc.platform}",
        }
        return incarnation

    async def sweep(self, known: frozenset[str]) -> list[str]:
        """Everything is in the launcher's slots, which native sweeps."""
        return []

    async def close(self) -> None:
        """Nothing runs but what is in the launcher's slots."""

    def leftovers(self) -> bool:
        """Nothing is outside the launcher's slots."""
        return False

    # --- which platform works ---------------------------------------------------------------------------------------

    async def _probe(self, path: Path, version: str) -> Runsc:
        """The first platform that runs a guest. What was found is remembered for this kernel and this file."""
        info = os.stat(path)
        key = f"{os.uname().release} {path} {info.st_size} {info.st_mtime_ns}"
        memory = self._home / "runsc.json"
        with suppress(OSError, ValueError):
            known = json.loads(memory.read_text())
            if isinstance(known, dict) and known.get("key") == key and known.get("platform") in PLATFORMS:
                return Runsc(path, version, known["platform"])
        failures = []
        for platform in PLATFORMS:
            try:
                await self._try(Runsc(path, version, platform))
            except ProctorError as error:
                failures.append(f"{platform}: {error.message}")
                continue
            with suppress(OSError):
                memory.write_text(json.dumps({"key": key, "platform": platform}))
            return Runsc(path, version, platform)
        raise RefusedError(
            f"runsc {version} runs nothing here: {'; '.join(failures)}",
            field="runtime",
            remedy=f"install a newer one: {_REMEDY}",
        )

    async def _try(self, runsc: Runsc) -> None:
        """A whole life: an empty root, a guest that says HELLO and answers a ping, an end."""
        empty = self._native.directory / "empty"
        empty.mkdir(exist_ok=True)
        resources = Resources(memory_mb=256, disk_mb=4, disk_inodes=64, pids=16, disk_driver="memory")
        image = Image("empty", "sha256:", (Layer(empty),))
        spec = SandboxSpec(image=image, resources=resources, lifecycle=Lifecycle(ttl_s=None))
        order = Order(f"probe-{runsc.platform}", 1, spec, image, image.layers, (empty,), lambda: None)
        incarnation = await self._launch(order, runsc)
        try:
            with anyio.fail_after(_PROBE_S):
                async with anyio.create_task_group() as tasks:
                    await tasks.start(incarnation.channel.run)
                    await incarnation.channel.ping()
                    tasks.cancel_scope.cancel()
        except (TimeoutError, ExceptionGroup, InfraError) as error:
            raise LaunchError(incarnation.last_words() or f"it does not answer: {error}") from error
        finally:
            with anyio.CancelScope(shield=True):
                await incarnation.kill()
                incarnation.close_counters()
                await incarnation.remove()
                for descriptor in incarnation.descriptors():
                    os.close(descriptor)


def _host_pids(pids: int) -> int:
    """Tasks of the machine that the sandbox may have.

    gVisor's own limit gives way when many processes fork at once. This one does not, and gVisor does not survive it.
    """
    return _SENTRY_PIDS + _PIDS_PER_PROCESS * pids


def _version(path: Path) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RefusedError(f"{path} does not run: {error}", field="runtime", remedy=_REMEDY) from error
    return done.stdout.split("\n", 1)[0].removeprefix("runsc version ").strip()


def _planned(plan: Plan, order: Order, runsc: Runsc, errors: ErrorLog) -> Plan:
    """The native plan of the same sandbox, with gVisor in its slot."""
    words = (
        "/stage/runsc",
        "--root=/stage/state",
        f"--platform={runsc.platform}",
        "--network=none",
        "--ignore-cgroups",
        # The upper is ours: nothing may be kept back in the sentry's memory, or a diff would not see it.
        "--overlay2=none",
        "--file-access=shared",
        "--host-uds=none",
        "--host-fifo=none",
        "run",
        "--bundle=/stage",
        "box",
    )
    program = Program(
        words=words,
        tools=(("runsc", runsc.path), ("guest", BINARY)),
        file_name="config.json",
        file=json.dumps(bundle(order.spec, plan)).encode(),
        log=errors.descriptor,
    )
    limits = replace(plan.limits, pids=_host_pids(order.spec.resources.pids))
    return replace(plan, program=program, limits=limits)


def bundle(spec: SandboxSpec, plan: Plan) -> dict[str, Any]:
    """The OCI runtime configuration (config.json, version 1.0.2)."""
    capabilities = list(_CAPABILITIES.values())
    guest = [
        _GUEST,
        "guest",
        f"caps={DEFAULT_CAPABILITIES:x}",
        f"mark={RLIMIT_CORE}",
        f"filter={gvisor_program().hex()}",
        f"count={spec.resources.pids}",
        f"placeholder={_PLACEHOLDER}",
        f"self={_GUEST}",
        "hide=1",
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": guest,
            "env": [],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": _OPEN_FILES, "soft": _OPEN_FILES}],
        },
        "root": {"path": "/new", "readonly": False},
        "hostname": spec.hostname,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", "nosuid", "noexec", "nodev"]},
            {
                "destination": "/dev/shm",
                "type": "tmpfs",
                "source": "shm",
                "options": ["nosuid", "nodev", "mode=1777", f"size={plan.shm_size}"],
            },
            {"destination": _GUEST, "type": "bind", "source": "/stage/guest", "options": ["bind", "ro"]},
            # They are there already, as parts of the root. gVisor has to know of each that nothing can be changed.
            *(
                {"destination": bind.target, "type": "bind", "source": f"/new{bind.target}", "options": ["rbind", "ro"]}
                for bind in plan.binds
            ),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "network", "ipc", "uts")]},
    }
