"""The plan of one sandbox and its encoding: the Python half of `csrc/plan.h`.

Pure values and functions. A message is a 16-byte header (magic, version, type, request id), then fields of
`u16 tag, u32 length, bytes`, little-endian; texts end with a zero byte.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from proctor.common import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
MAX_LAYERS = 120
STACK_MAX = MAX_LAYERS - 3
"""Layers that a sandbox may have of its own: of a carried one two name the name server and one its authorities."""
MAX_BINDS = 64
MESSAGE_MAX = 128 * 1024
REPLY_MAX = 8192

_MAGIC = 0x43525031
_HEADER = struct.Struct("<IHHQ")
_FIELD = struct.Struct("<HI")
_LAUNCHED = struct.Struct("<iII32s64s768s768s")
_HELD_BODY = struct.Struct("<64s64sIIII")
_CONFIG, _READY, _LAUNCH, _LAUNCHED_TYPE, _HELD, _ADOPT = 1, 2, 3, 4, 5, 6
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}\Z")

DOCKER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 31)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, SETFCAP:
what package managers and build tools need of root. All of them count only against the sandbox's own user namespace; the
network namespace belongs to the machine, so the two NET ones give nothing there. MKNOD and AUDIT_WRITE are left out."""

DEFAULT_CAPABILITIES = sum(1 << number for number in DOCKER_CAPABILITIES)


@dataclass(frozen=True, slots=True)
class MemoryUpper:
    """The private layer in memory: a tmpfs with at most `size_bytes` and `inodes`, charged to the sandbox."""

    size_bytes: int
    inodes: int


@dataclass(frozen=True, slots=True)
class LoopUpper:
    """The private layer in an ext4 image file, whose size is the limit."""

    image: Path


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory or file of the machine shown read-only at `target`; without a source an empty directory."""

    source: Path | None
    target: str


@dataclass(frozen=True, slots=True)
class Program:
    """What a slot executes instead of becoming the guest: gVisor's runsc, in a room of its own (csrc/room.h).

    `tools` are files of the machine that the room shows read-only as `/stage/<name>`; `file` is written to
    `/stage/<file_name>`. `log` is a descriptor for the program's errors; the caller keeps it.
    """

    words: tuple[str, ...]
    tools: tuple[tuple[str, Path], ...]
    file_name: str
    file: bytes
    log: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard limits of the sandbox's groups. `pids` counts the guest; `cpu_quota_us` 0 means no quota."""

    memory_bytes: int
    pids: int
    cpu_quota_us: int = 0
    cpu_period_us: int = 100_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the launcher needs to know to make one sandbox.

    `layers` are lowest first: a path, or an open directory descriptor (a frozen upper that has no path). The caller
    keeps ownership of descriptors.
    """

    name: str
    layers: tuple[Path | int, ...]
    upper: MemoryUpper | LoopUpper
    limits: Limits
    seccomp: bytes
    hostname: str = "sandbox"
    binds: tuple[Bind, ...] = ()
    capabilities: int = DEFAULT_CAPABILITIES
    network: Literal["none", "open", "carried"] = "none"
    """`carried`: as `none`, and the guest serves names and connections."""
    shm_bytes: int | None = None
    """Size of /dev/shm. None: 64 MB, but at most a sixteenth of the memory, so that a full one starves nobody."""
    force_paths: bool = False
    durable_until_ms: int | None = None
    """None: it ends with its Edge. Otherwise it outlives it, until this time of CLOCK_BOOTTIME at most (0: no end)."""
    program: Program | None = None

    def __post_init__(self) -> None:
        _require(_PLAIN_NAME.match(self.name) is not None, "name", "1-63 of letters, digits, dash, underscore")
        _require(0 < len(self.hostname.encode()) < 64 and "\0" not in self.hostname, "hostname", "1-63 bytes")
        _require(0 < len(self.layers) <= MAX_LAYERS, "layers", f"between 1 and {MAX_LAYERS}")
        tools = len(self.program.tools) if self.program is not None else 0
        _require(len(self.binds) + tools <= MAX_BINDS, "mounts", f"at most {MAX_BINDS - tools}")
        _require(self.limits.memory_bytes > 0 and self.limits.pids > 0, "limits", "memory and pids above zero")
        for layer in self.layers:
            _require(isinstance(layer, int) or layer.is_absolute(), "layers", f"an absolute path, not {layer}")
        for bind in self.binds:
            _require(bind.source is None or bind.source.is_absolute(), "mounts", "absolute paths")
            _require(bind.target.startswith("/"), "mounts", "absolute paths")
            _require(".." not in bind.target.split("/"), "mounts", f"a target without '..', not {bind.target}")

    @property
    def shm_size(self) -> int:
        """Bytes that /dev/shm may hold."""
        return self.shm_bytes or min(64 << 20, self.limits.memory_bytes // 16)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that travel with the message, in the order of their indices: layers, the program's log."""
        layers = tuple(layer for layer in self.layers if isinstance(layer, int))
        return layers if self.program is None else (*layers, self.program.log)


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """One tree for the launcher: its controllers (`memory,cpu`; `unified`; `*` for cgroup2 with controllers) and the
    Edge's directory in it."""

    controllers: str
    path: Path


@dataclass(frozen=True, slots=True)
class LauncherSetup:
    """What the launcher has to know once."""

    edge: str
    cgroups: tuple[CgroupTree, ...]
    pool: int
    uid_start: int
    uid_ranges: int
    guest_uid: int
    durable: bool = False
    """It outlives its Edge; a listening socket and a lock come with the message."""


@dataclass(frozen=True, slots=True)
class LaunchReply:
    """The launcher's answer. `errno` 0 means that three descriptors came with it: pidfd, channel, upper directory."""

    request: int
    errno: int
    step: str
    pid: int
    uid_base: int
    slot: str
    timings_us: dict[str, int] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


def encode_setup(setup: LauncherSetup) -> bytes:
    """The CONFIG message."""
    fields = [_field(1, _text(setup.edge))]
    fields += [_field(2, _text(tree.controllers) + _text(str(tree.path))) for tree in setup.cgroups]
    fields.append(_field(3, struct.pack("<IIII", setup.pool, setup.uid_start, setup.uid_ranges, setup.guest_uid)))
    if setup.durable:
        fields.append(_field(4, b""))
    return _HEADER.pack(_MAGIC, VERSION, _CONFIG, 0) + b"".join(fields)


def encode_plan(plan: Plan, request: int) -> bytes:
    """The LAUNCH message of `plan` as request number `request` (its descriptors are `plan.descriptors`)."""
    fields = [_field(1, _text(plan.name)), _field(7, _text(plan.hostname))]
    index = 0
    for layer in plan.layers:
        if isinstance(layer, int):
            fields.append(_field(3, struct.pack("<I", index)))
            index += 1
        else:
            fields.append(_field(2, _text(str(layer))))
    if isinstance(plan.upper, MemoryUpper):
        fields.append(_field(4, struct.pack("<QQ", plan.upper.size_bytes, plan.upper.inodes)))
    else:
        fields.append(_field(5, _text(str(plan.upper.image))))
    fields += [_field(6, _text(str(bind.source or "-")) + _text(bind.target)) for bind in plan.binds]
    limits = plan.limits
    numbers = (limits.memory_bytes, limits.cpu_quota_us, limits.cpu_period_us, limits.pids)
    fields.append(_field(8, struct.pack("<QQQQ", *numbers)))
    fields.append(_field(9, struct.pack("<Q", plan.capabilities)))
    fields.append(_field(10, plan.seccomp))
    fields.append(_field(11, struct.pack("<I", 1 if plan.network == "open" else 0)))
    fields.append(_field(12, struct.pack("<Q", plan.shm_size)))
    durable = plan.durable_until_ms is not None
    fields.append(_field(13, struct.pack("<I", (1 if plan.force_paths else 0) | (2 if durable else 0))))
    if durable:
        fields.append(_field(14, struct.pack("<Q", plan.durable_until_ms)))
    if plan.program is not None:
        fields += _program_fields(plan.program, index)
    message = _HEADER.pack(_MAGIC, VERSION, _LAUNCH, request) + b"".join(fields)
    _require(len(message) <= MESSAGE_MAX, "plan", f"at most {MESSAGE_MAX} bytes when encoded, not {len(message)}")
    return message


@dataclass(frozen=True, slots=True)
class Held:
    """A durable sandbox that a launcher has kept for its next Edge: `name` is that of its plan."""

    slot: str
    name: str
    pid: int
    uid_base: int
    dead: bool
    expired: bool
    """The launcher has ended it, because its time was up."""


def encode_adopt(slot: str, request: int) -> bytes:
    """The ADOPT message: give the sandbox in `slot` a new channel. Answered as a launch is."""
    return _HEADER.pack(_MAGIC, VERSION, _ADOPT, request) + _text(slot)


def decode_held(data: bytes) -> Held:
    """A HELD message; the last one has no slot and the launcher's own pid. Raises ValueError for anything else."""
    if len(data) != _HEADER.size + _HELD_BODY.size or _HEADER.unpack_from(data)[:3] != (_MAGIC, VERSION, _HELD):
        raise ValueError(f"{len(data)} bytes instead of what it holds")
    slot, name, pid, uid_base, dead, expired = _HELD_BODY.unpack_from(data, _HEADER.size)
    return Held(_untext(slot), _untext(name), pid, uid_base, bool(dead), bool(expired))


def _program_fields(program: Program, log_index: int) -> list[bytes]:
    fields = [_field(15, b"".join(_text(word) for word in program.words))]
    fields += [_field(16, _text(str(source)) + _text(f"/{name}")) for name, source in program.tools]
    fields.append(_field(17, _text(program.file_name) + program.file))
    fields.append(_field(18, struct.pack("<I", log_index)))
    return fields


def decode_reply(data: bytes) -> LaunchReply | None:
    """A message of the launcher: None for READY. Raises ValueError for anything that is not one of its messages."""
    if len(data) < _HEADER.size:
        raise ValueError(f"a message of {len(data)} bytes")
    magic, version, kind, request = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise ValueError(f"magic {magic:#x}, version {version}")
    if kind == _READY and len(data) == _HEADER.size:
        return None
    if kind != _LAUNCHED_TYPE or len(data) != _HEADER.size + _LAUNCHED.size:
        raise ValueError(f"type {kind} with {len(data)} bytes")
    errno, pid, uid_base, step, slot, timings, facts = _LAUNCHED.unpack_from(data, _HEADER.size)
    return LaunchReply(
        request=request,
        errno=errno,
        step=_untext(step),
        pid=pid,
        uid_base=uid_base,
        slot=_untext(slot),
        timings_us={name: int(value) for name, value in _words(timings)},
        facts=dict(_words(facts)),
    )


def _words(raw: bytes) -> list[tuple[str, str]]:
    pairs = (word.split("=", 1) for word in _untext(raw).split())
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def _untext(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    _require(b"\0" not in raw and raw != b"", "plan", "texts that are neither empty nor hold a zero byte")
    return raw + b"\0"


def _field(tag: int, value: bytes) -> bytes:
    return _FIELD.pack(tag, len(value)) + value


def _require(condition: bool, name: str, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"must be {wanted}", field=name)
