"""The system call filter of sandboxed commands: a readable allow-list, compiled to BPF.

A call is allowed (perhaps after a look at its arguments), refused by name with EPERM, or unknown and answered with
ENOSYS, as an older kernel would: C libraries and runtimes then use what they used before. Foreign calling conventions
(i386 on x86_64, 32-bit on aarch64) kill the process; x32 gets ENOSYS.

`ptrace` is allowed on purpose. Debuggers and strace need it, it reaches only processes of the same sandbox, it cannot
touch the guest (not dumpable, memory owned by the initial user namespace), and since Linux 4.8 it does not get around a
filter. `process_vm_*`, `pidfd_getfd` and `kcmp` do the same in ways that hardly anybody needs, and are refused.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from proctor.common import RefusedError
from proctor.sandbox.native.syscall_numbers import Arch, numbers

_ALLOWED: Final = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range
    open openat openat2 creat dup dup2 dup3 fcntl flock pipe pipe2 sendfile splice tee vmsplice copy_file_range
    stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2 getcwd chdir fchdir chroot umask
    getdents getdents64 readlink readlinkat link linkat symlink symlinkat unlink unlinkat rename renameat renameat2
    mkdir mkdirat rmdir mknod mknodat truncate ftruncate fallocate fadvise64 readahead
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
    sync syncfs fsync fdatasync sync_file_range sync_file_range2 cachestat
    getxattr lgetxattr fgetxattr getxattrat setxattr lsetxattr fsetxattr setxattrat
    listxattr llistxattr flistxattr listxattrat removexattr lremovexattr fremovexattr removexattrat
    inotify_init inotify_init1 inotify_add_watch inotify_rm_watch

    mmap munmap mremap mprotect madvise msync mincore brk mlock mlock2 mlockall munlock munlockall remap_file_pages
    pkey_alloc pkey_free pkey_mprotect memfd_create membarrier mseal map_shadow_stack
    mbind get_mempolicy set_mempolicy set_mempolicy_home_node

    fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp setpgid getsid setsid
    getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid setresgid
    setgroups setfsuid setfsgid capget capset prctl arch_prctl seccomp ptrace
    landlock_create_ruleset landlock_add_rule landlock_restrict_self lsm_get_self_attr lsm_list_modules
    getrlimit getrusage times getpriority setpriority ioprio_get ioprio_set
    sched_yield sched_getaffinity sched_setaffinity sched_getattr sched_setattr sched_getparam sched_setparam
    sched_getscheduler sched_setscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval getcpu
    futex futex_waitv futex_wake futex_wait futex_requeue set_robust_list get_robust_list set_tid_address rseq
    restart_syscall pidfd_open pidfd_send_signal process_mrelease sysinfo uname

    kill tkill tgkill rt_sigaction rt_sigprocmask rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo
    rt_tgsigqueueinfo rt_sigreturn sigaltstack signalfd signalfd4 pause alarm getitimer setitimer
    nanosleep clock_nanosleep clock_gettime clock_getres clock_adjtime adjtimex gettimeofday time
    timer_create timer_delete timer_gettime timer_settime timer_getoverrun
    timerfd_create timerfd_gettime timerfd_settime

    select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
    io_submit io_cancel io_destroy io_getevents io_pgetevents
    bind listen accept accept4 connect shutdown getsockname getpeername getsockopt setsockopt socketpair
    sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgsnd msgrcv msgctl
    semget semop semtimedop semctl shmget shmat shmdt shmctl getrandom
"""

_REFUSED: Final = """
    mount umount2 pivot_root move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick mount_setattr setns
    statmount listmount name_to_handle_at open_by_handle_at fanotify_init fanotify_mark quotactl quotactl_fd acct
    swapon swapoff reboot kexec_load kexec_file_load init_module finit_module delete_module
    bpf perf_event_open userfaultfd keyctl add_key request_key process_vm_readv process_vm_writev process_madvise
    pidfd_getfd kcmp move_pages migrate_pages lookup_dcookie memfd_secret lsm_set_self_attr
    iopl ioperm modify_ldt syslog vhangup sethostname setdomainname settimeofday clock_settime
"""

_MISSING: Final = "clone3 io_uring_setup io_uring_enter io_uring_register io_setup"
"""Answered with ENOSYS although we know them: a filter cannot look into clone3's structure, so libraries must fall back
to clone; io_uring would do file and socket work that this filter never sees; the machine has 65,536 places for
asynchronous I/O for everybody, and one call of io_setup takes as many as it likes."""

_LD_ABS, _JEQ, _JGE, _JSET, _JA, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x05, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AUDIT_ARCH: Final[dict[str, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_NR, _ARCH_OFFSET = 0, 4

_RLIMIT_CORE = 4

_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEWTIME = 0x80  # a signal number in clone's flags, a namespace in unshare's


@dataclass(frozen=True, slots=True)
class Instruction:
    """One BPF instruction (struct sock_filter)."""

    code: int
    k: int = 0
    jt: int = 0
    jf: int = 0


_Code = list[Instruction]
_Action = Literal["allow", "refuse", "missing"] | str


def program(machine: str | None = None) -> bytes:
    """The compiled filter for `machine` (default: this one) as an array of struct sock_filter.

    Raises RefusedError on an architecture without a table: running without a filter is not offered.
    """
    name = machine or platform.machine()
    arch: Arch
    if name in ("x86_64", "AMD64"):
        arch = "x86_64"
    elif name in ("aarch64", "arm64"):
        arch = "aarch64"
    else:
        raise RefusedError(f"no system call filter for {name}", field="runtime", remedy="use x86_64 or aarch64")
    return _compiled(arch)


@cache
def _compiled(arch: Arch) -> bytes:
    return encode(assemble(arch, {}))


def encode(code: list[Instruction]) -> bytes:
    """Instructions as an array of struct sock_filter."""
    return b"".join(struct.pack("<HBBI", step.code, step.jt, step.jf, step.k) for step in code)


def actions(arch: Arch) -> dict[str, str]:
    """What happens to each known call: `allow`, `refuse` (EPERM), `missing` (ENOSYS), or the name of a rule below."""
    table = dict.fromkeys(_ALLOWED.split(), "allow")
    table |= dict.fromkeys(_REFUSED.split(), "refuse")
    table |= dict.fromkeys(_MISSING.split(), "missing")
    table |= {name: name for name in _RULES}
    known = numbers(arch)
    return {name: action for name, action in table.items() if name in known}


def assemble(arch: Arch, rules: dict[str, list[Instruction]]) -> list[Instruction]:
    """The whole filter; `rules` replace the table's own for the calls that they name."""
    known = numbers(arch)
    by_number = {known[name]: action for name, action in actions(arch).items()}
    boundaries: list[tuple[int, str]] = []
    for number in range(max(by_number) + 2):
        action = by_number.get(number, "missing")
        if not boundaries or boundaries[-1][1] != action:
            boundaries.append((number, action))
    head = [Instruction(_LD_ABS, _ARCH_OFFSET), Instruction(_JEQ, _AUDIT_ARCH[arch], 1, 0), _ret(_KILL)]
    head.append(Instruction(_LD_ABS, _NR))
    if arch == "x86_64":
        head += [Instruction(_JGE, _X32_BIT, 0, 1), _errno(errno.ENOSYS)]
    return head + _search(boundaries, {**_RULES, **rules})


def _search(ranges: list[tuple[int, str]], rules: dict[str, _Code]) -> _Code:
    """A binary search over (first number, action) ranges: about eight comparisons for any call. The kernel remembers
    calls that are allowed whatever their arguments and does not even run this for them (since 5.11)."""
    if len(ranges) == 1:
        return _leaf(ranges[0][1], rules)
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle], rules), _search(ranges[middle:], rules)
    pivot = ranges[middle][0]
    if len(low) <= 255:
        return [Instruction(_JGE, pivot, len(low), 0), *low, *high]
    return [Instruction(_JGE, pivot, 0, 1), Instruction(_JA, len(low)), *low, *high]


def _leaf(action: str, rules: dict[str, _Code]) -> _Code:
    if action == "allow":
        return [_ret(_ALLOW)]
    if action == "refuse":
        return [_errno(errno.EPERM)]
    if action == "missing":
        return [_errno(errno.ENOSYS)]
    return rules[action]


def _ret(value: int) -> Instruction:
    return Instruction(_RET, value)


def _errno(number: int) -> Instruction:
    return Instruction(_RET, _ERRNO | number)


def argument(index: int, *, high: bool = False) -> Instruction:
    """Load the low half of an argument (both architectures are little-endian). The kernel takes most arguments as
    32-bit values, whose high half says nothing; of a pointer both halves count."""
    return Instruction(_LD_ABS, 16 + 8 * index + 4 * high)


def jump_equal(value: int, then: int, otherwise: int) -> Instruction:
    """Skip `then` instructions if the accumulator is `value`, else `otherwise`."""
    return Instruction(_JEQ, value, then, otherwise)


def allow() -> Instruction:
    """Let the call through."""
    return _ret(_ALLOW)


def refuse(number: int) -> Instruction:
    """Answer the call with an error; 0 is success without effect."""
    return _errno(number)


def _unless_flags(mask: int) -> _Code:
    return [argument(0), Instruction(_JSET, mask, 0, 1), _errno(errno.EPERM), _ret(_ALLOW)]


def _one_of(values: tuple[int, ...], otherwise: int) -> _Code:
    """Allow when the accumulator is one of `values`, else answer `otherwise`."""
    code: _Code = []
    for value in values:
        code += [Instruction(_JEQ, value, 0, 1), _ret(_ALLOW)]
    return [*code, _errno(otherwise)]


def _ioctl() -> _Code:
    """Terminal injection and line disciplines are refused; of the ioctls that file systems define for themselves (types
    `f`, `X` and 0x94: attributes, freezing, defragmenting, swapping extents), only the harmless ones are allowed."""
    terminal = (0x5412, 0x541C, 0x5423, 0x541D)  # TIOCSTI, TIOCLINUX, TIOCSETD, TIOCCONS
    code = [argument(1)]
    for command in terminal:
        code += [Instruction(_JEQ, command, 0, 1), _errno(errno.EPERM)]
    harmless = (
        0x80086601,  # FS_IOC_GETFLAGS
        0x80046601,  # FS_IOC32_GETFLAGS
        0xC020660B,  # FS_IOC_FIEMAP
        0x801C581F,  # FS_IOC_FSGETXATTR
        0x40049409,  # FICLONE
        0x4020940D,  # FICLONERANGE
        0xC0189436,  # FIDEDUPERANGE
    )
    for command in harmless:
        code += [Instruction(_JEQ, command, 0, 1), _ret(_ALLOW)]
    code.append(Instruction(_AND, 0xFF00))
    for kind in (0x6600, 0x5800, 0x9400):
        code += [Instruction(_JEQ, kind, 0, 1), _errno(errno.ENOTTY)]
    return [*code, _ret(_ALLOW)]


def _core_limit(resource: int, value: int | None) -> _Code:
    """Setting RLIMIT_CORE succeeds and changes nothing: it is 1, which alone keeps the kernel from starting the
    machine's `core_pattern` program for a crash inside, and many programs fail when they cannot lower it to 0.
    `resource` and `value` are positions of arguments (the latter NULL for a query; None where the call always sets)."""
    silent = _errno(0)
    if value is None:
        return [argument(resource), Instruction(_JEQ, _RLIMIT_CORE, 0, 1), silent, _ret(_ALLOW)]
    high = Instruction(_LD_ABS, 16 + 8 * value + 4)
    return [
        argument(resource),
        Instruction(_JEQ, _RLIMIT_CORE, 1, 0),
        _ret(_ALLOW),
        argument(value),
        Instruction(_JEQ, 0, 0, 2),
        high,
        Instruction(_JEQ, 0, 1, 0),
        silent,
        _ret(_ALLOW),
    ]


def _socket() -> _Code:
    """Unix sockets; internet ones with TCP, UDP or ICMP (other protocols would load kernel modules); netlink for routes
    only, which C libraries ask for the machine's addresses."""
    internet = [argument(2), *_one_of((0, 1, 6, 17, 58), errno.EPROTONOSUPPORT)]
    netlink = [argument(2), *_one_of((0,), errno.EPROTONOSUPPORT)]
    code = [
        argument(0),
        Instruction(_JEQ, 1, 0, 1),
        _ret(_ALLOW),
        Instruction(_JEQ, 2, 1, 0),
        Instruction(_JEQ, 10, 0, len(internet)),
        *internet,
        Instruction(_JEQ, 16, 0, len(netlink)),
        *netlink,
        _errno(errno.EAFNOSUPPORT),
    ]
    return code


_RULES: Final[dict[str, _Code]] = {
    "clone": _unless_flags(_NAMESPACE_FLAGS),
    "unshare": _unless_flags(_NAMESPACE_FLAGS | _NEWTIME),
    # PER_LINUX, PER_LINUX32, UNAME26 with both, ADDR_NO_RANDOMIZE (debuggers), and the query.
    "personality": [
        argument(0),
        *_one_of((0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF), errno.EPERM),
    ],
    "ioctl": _ioctl(),
    "setrlimit": _core_limit(0, None),
    "prlimit64": _core_limit(1, 2),
    "socket": _socket(),
}
