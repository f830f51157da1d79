"""What the system call filter has to add where the guest shares more with its commands than a native guest does.

Under gVisor and Docker the guest has the same user id as the root of the sandbox, and the processes of a command are
known by a mark, a resource limit that they inherit (csrc/group.h). So commands may change no such limit, and nothing
of process 1; gVisor, unlike Linux, would also let them kill it.
"""

from __future__ import annotations

import errno
import platform
from typing import Final

from proctor.common import RefusedError
from proctor.sandbox.native.seccomp import Instruction, allow, argument, assemble, encode, jump_equal, refuse
from proctor.sandbox.native.syscall_numbers import Arch, numbers

RLIMIT_CORE: Final = 4
RLIMIT_LOCKS: Final = 10
_GUEST: Final = 1
_F_SETOWN, _F_SETOWN_EX = 8, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902

Code = list[Instruction]


def docker_program(machine: str | None = None) -> bytes:
    """The native filter, with marks and process 1 out of reach of commands."""
    arch = _arch(machine)
    limits = (RLIMIT_CORE, RLIMIT_LOCKS)
    return encode(assemble(arch, {"setrlimit": _set_limit(limits), "prlimit64": _set_limit_of(limits)}))


def gvisor_program(machine: str | None = None) -> bytes:
    """Marks and process 1 out of reach; what else may be called is gVisor's own business: no call reaches Linux."""
    known = numbers(_arch(machine))
    rules: dict[str, Code] = {
        "setrlimit": _set_limit((RLIMIT_CORE,)),
        "prlimit64": _set_limit_of((RLIMIT_CORE,)),
        "kill": _not_the_guest(0),
        "tkill": _not_the_guest(0),
        "tgkill": _not_the_guest(0, 1),
        "rt_sigqueueinfo": _not_the_guest(0),
        "rt_tgsigqueueinfo": _not_the_guest(0, 1),
        "pidfd_open": _not_the_guest(0),
        # Signals of file descriptors are sent by the kernel, to whoever is named here.
        "fcntl": _no_owner(1, (_F_SETOWN, _F_SETOWN_EX)),
        "ioctl": _no_owner(1, (_FIOSETOWN, _SIOCSPGRP)),
    }
    code: Code = [Instruction(0x20, 0)]
    for name, rule in rules.items():
        if name in known:
            code += [jump_equal(known[name], 0, len(rule)), *rule]
    return encode([*code, allow()])


def _arch(machine: str | None) -> Arch:
    name = machine or platform.machine()
    arches: dict[str, Arch] = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
    if name not in arches:
        raise RefusedError(f"no system call filter for {name}", field="runtime", remedy="use x86_64 or aarch64")
    return arches[name]


def _set_limit(resources: tuple[int, ...]) -> Code:
    """`setrlimit`: of these resources it succeeds and changes nothing, since many programs stop when it fails."""
    code = [argument(0)]
    for resource in resources:
        code += [jump_equal(resource, 0, 1), refuse(0)]
    return [*code, allow()]


def _set_limit_of(resources: tuple[int, ...]) -> Code:
    """`prlimit64`: asking is free; nothing of process 1 can be set."""
    asks = [argument(2), jump_equal(0, 0, 3), argument(2, high=True), jump_equal(0, 0, 1), allow()]
    return [*asks, argument(0), jump_equal(_GUEST, 0, 1), refuse(errno.EPERM), argument(1), *_set_limit(resources)[1:]]


def _not_the_guest(*positions: int) -> Code:
    code: Code = []
    for position in positions:
        code += [argument(position), jump_equal(_GUEST, 0, 1), refuse(errno.EPERM)]
    return [*code, allow()]


def _no_owner(position: int, commands: tuple[int, ...]) -> Code:
    code = [argument(position)]
    for command in commands:
        code += [jump_equal(command, 0, 1), refuse(errno.EPERM)]
    return [*code, allow()]
