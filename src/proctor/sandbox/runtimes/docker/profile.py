"""What a container is asked for: every hardening that the engine has, and our filter as its seccomp profile."""

from __future__ import annotations

import json
import platform
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from proctor.sandbox.native.guardfilter import RLIMIT_LOCKS, docker_program
from proctor.sandbox.native.launcher import BINARY
from proctor.sandbox.native.plan import DEFAULT_CAPABILITIES
from proctor.sandbox.native.seccomp import actions
from proctor.sandbox.runtimes.docker.images import GUEST

if TYPE_CHECKING:
    from proctor.sandbox.contract import SandboxSpec
    from proctor.sandbox.native.plan import Plan

CAPABILITIES: Final = {
    0: "CHOWN",
    1: "DAC_OVERRIDE",
    3: "FOWNER",
    4: "FSETID",
    5: "KILL",
    6: "SETGID",
    7: "SETUID",
    8: "SETPCAP",
    10: "NET_BIND_SERVICE",
    13: "NET_RAW",
    18: "SYS_CHROOT",
    31: "SETFCAP",
}
"""Those of DEFAULT_CAPABILITIES. There is no user namespace, so they count against the machine: NET_RAW is left out."""
_MASK: Final = DEFAULT_CAPABILITIES & ~(1 << 13)
_OPEN_FILES: Final = 16_384
_FOR_THE_GUEST: Final = ("clone3", "openat2", "clone", "unshare", "execve")


@cache
def seccomp_profile() -> str:
    """Our table as a profile of the engine's.

    What depends on arguments is allowed here and decided by the filter that the guest gives to each command; the guest
    itself and the engine's own start-up need a little more.
    """
    machine = platform.machine()
    table = actions("aarch64" if machine in ("aarch64", "arm64") else "x86_64")
    names = sorted({*(name for name, action in table.items() if action not in ("refuse", "missing")), *_FOR_THE_GUEST})
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": ["SCMP_ARCH_AARCH64" if machine in ("aarch64", "arm64") else "SCMP_ARCH_X86_64"],
        "syscalls": [{"names": names, "action": "SCMP_ACT_ALLOW", "args": []}],
    }
    return json.dumps(profile)


def container(spec: SandboxSpec, plan: Plan, image: str, labels: dict[str, str]) -> dict[str, Any]:
    """The body of `POST /containers/create`. `plan`: the native plan of the same sandbox, for its numbers and binds."""
    resources = spec.resources
    words = [f"caps={_MASK:x}", f"mark={RLIMIT_LOCKS}", f"filter={docker_program().hex()}"]
    binds = [f"{bind.source}:{bind.target}:ro" for bind in plan.binds]
    limits = plan.limits
    return {
        "Image": image,
        "Hostname": spec.hostname,
        "User": "0:0",
        "Env": [],
        "Entrypoint": [GUEST, "guest", *words],
        "Cmd": [],
        "WorkingDir": "/",
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "Labels": labels,
        "HostConfig": {
            "NetworkMode": "none",
            "Dns": ["127.0.0.53"],
            "Binds": [f"{BINARY}:{GUEST}:ro", *binds],
            "Memory": limits.memory_bytes,
            "MemorySwap": limits.memory_bytes,
            "CpuQuota": limits.cpu_quota_us,
            "CpuPeriod": limits.cpu_period_us,
            "PidsLimit": resources.pids + 1,
            "CapDrop": ["ALL"],
            "CapAdd": [name for number, name in CAPABILITIES.items() if _MASK >> number & 1],
            "SecurityOpt": ["no-new-privileges", f"seccomp={seccomp_profile()}"],
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "ShmSize": plan.shm_size,
            "Ulimits": [{"Name": "nofile", "Soft": _OPEN_FILES, "Hard": _OPEN_FILES}],
            "LogConfig": {"Type": "none", "Config": {}},
            "RestartPolicy": {"Name": "no"},
            "Sysctls": {"net.ipv4.ip_unprivileged_port_start": "0"},
        },
    }
