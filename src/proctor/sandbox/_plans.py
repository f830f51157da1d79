"""From what a caller states to what the launcher is told: checks, the plan of a launch, what enforces each limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.common import ConfigError, RefusedError
from proctor.sandbox import disk
from proctor.sandbox.native.plan import Bind, Limits, LoopUpper, MemoryUpper, Plan
from proctor.sandbox.native.seccomp import program
from proctor.sandbox.runtimes.capabilities import capabilities_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from proctor.sandbox.contract import Image, Resources, SandboxSpec
    from proctor.sandbox.native.cgroup import CgroupLayout
    from proctor.sandbox.native.launcher import Launched

_CPU_PERIOD_US = 100_000
_CPU_QUOTA_FLOOR_US = 1000
"""The kernel takes no smaller quota."""


def check(spec: SandboxSpec) -> None:
    """Refuse what no runtime, or not the one that was asked for, can honour, by the field's name."""
    if spec.backend != "container":
        raise RefusedError(f"{spec.backend} is not available", field="backend", remedy="use container")
    if isinstance(spec.network, str) and spec.network not in ("none", "open"):
        raise RefusedError(
            f"{spec.network!r} is not available", field="network", remedy="use none, open or a NetworkPolicy"
        )
    capabilities_of(spec.runtime).refuse(spec)
    resources = spec.resources
    for name, value in (("cpus", resources.cpus), ("memory_mb", resources.memory_mb), ("pids", resources.pids)):
        if not value > 0:
            raise ConfigError(f"must be above zero, not {value}", field=f"resources.{name}")
    if spec.self_test and resources.pids < 2:
        raise ConfigError(f"the self-test needs 2 processes, not {resources.pids}", field="resources.pids")
    for mount in spec.mounts:
        if not mount.source.is_absolute() or not mount.target.startswith("/"):
            raise ConfigError(f"{mount.source} at {mount.target}: both paths must be absolute", field="mounts")
        if not mount.source.exists():
            raise ConfigError(f"{mount.source} does not exist", field="mounts")
    for name in ("ttl_s", "idle_timeout_s", "pause_after_s"):
        limit = getattr(spec.lifecycle, name)
        if limit is not None and not limit > 0:
            raise ConfigError(f"must be above zero, not {limit}", field=f"lifecycle.{name}")


def check_durable(spec: SandboxSpec, *, durable_edge: bool, objects: Mapping[str, object]) -> None:
    """Refuse what a sandbox cannot take beyond its Edge. `objects`: what of this process it was to depend on, by
    name."""
    if not spec.lifecycle.durable:
        return
    field = "lifecycle.durable"
    if not durable_edge:
        raise RefusedError("this Edge ends its sandboxes with itself", field=field, remedy="use Edge(durable=True)")
    if spec.runtime != "native":
        raise RefusedError(f"{spec.runtime} ends its sandboxes with their Edge", field=field, remedy="use native")
    for name, given in objects.items():
        if given:
            raise RefusedError(
                f"{name} are of this process and end with it", field=field, remedy=f"make it tied, or without {name}"
            )
    if not isinstance(spec.network, str) and any(rule.restricted for rule in spec.network.rules):
        raise RefusedError(
            "methods and paths need a certificate authority, which ends with its process",
            field=field,
            remedy="make it tied, or name hosts and ports only",
        )


def is_open(spec: SandboxSpec) -> bool:
    """Whether the sandbox shares the machine's network."""
    return spec.network == "open" if isinstance(spec.network, str) else spec.network.mode == "open"


def make_plan(
    name: str,
    spec: SandboxSpec,
    image: Image,
    layers: tuple[Path | int, ...],
    image_file: Path | None,
    durable_until_ms: int | None = None,
) -> Plan:
    """The plan of one incarnation. `layers`: paths or open descriptors; `image_file`: the loop image, if any."""
    resources = spec.resources
    return Plan(
        name=name,
        layers=layers,
        upper=LoopUpper(image_file)
        if image_file is not None
        else MemoryUpper(disk.memory_size_mb(resources) << 20, resources.disk_inodes),
        limits=Limits(
            memory_bytes=resources.memory_mb << 20,
            pids=resources.pids + 1,
            cpu_quota_us=max(int(resources.cpus * _CPU_PERIOD_US), _CPU_QUOTA_FLOOR_US),
            cpu_period_us=_CPU_PERIOD_US,
        ),
        seccomp=program(),
        hostname=spec.hostname,
        binds=tuple(
            Bind(None if mount.empty else mount.source, mount.target) for mount in (*image.mounts, *spec.mounts)
        ),
        network="open" if is_open(spec) else "none",
        durable_until_ms=durable_until_ms,
    )


def mechanisms_of(
    layout: CgroupLayout, resources: Resources, driver: disk.Driver, launched: Launched, *, memory_works: bool
) -> dict[str, str]:
    """What enforces each limit here, what the launcher had to choose, and why `auto` chose loop: for the receipt."""
    size_mb = disk.memory_size_mb(resources)
    group = f"cgroup v{layout.version}"
    image = f"ext4 image of {resources.disk_mb} MB"
    if not memory_works and resources.disk_driver == "auto":
        image += f" ({disk.NO_MEMORY_REASON})"
    return {
        "memory": group,
        "cpus": group,
        "pids": group,
        "disk": image if driver == "loop" else f"tmpfs of {size_mb} MB",
        "ids": f"user namespace at {launched.uid_base}",
        **{f"launcher.{name}": value for name, value in launched.facts.items()},
    }
