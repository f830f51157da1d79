"""What each runtime can do. The table in docs/runtimes.md is made from this, and specs are refused by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from proctor.common import RefusedError
from proctor.sandbox.contract import Tier

if TYPE_CHECKING:
    from proctor.sandbox.contract import SandboxSpec


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime can do, as far as it does not depend on the machine."""

    runtime: str
    purpose: str
    tiers: tuple[Tier, ...]
    """What it achieves; the first where the machine allows it, and never less than the last."""
    needs: str
    networks: tuple[str, ...]
    least_memory_mb: int
    """What an empty sandbox needs, and a little."""
    over_memory: Literal["command", "sandbox"]
    """What ends, with reason OOM, when the memory limit is exceeded."""
    over_pids: Literal["command", "sandbox"]
    """What a storm of forks beyond the limit meets: refusal (`command`), or, where the limit gives way, its end."""
    disk_limit: Literal["kernel", "watched"]
    """`kernel`: a write beyond it fails; `watched`: the sandbox is ended with reason DISK soon after."""
    disk_inodes: bool
    durable: bool
    """Whether a sandbox can outlive its Edge."""
    mounts: bool
    host_image: bool
    special_files: bool
    """Whether FIFOs and sockets are part of the disk: in a diff, and still there after a snapshot."""
    extended_attributes: bool
    frozen_cost: Literal["constant", "size of the changes"]
    """What diff, snapshot and fork cost."""

    def refuse(self, spec: SandboxSpec) -> None:
        """Raise RefusedError, by the field's name, for what this runtime cannot honour."""
        network = spec.network if isinstance(spec.network, str) else spec.network.mode
        if network not in self.networks:
            raise self._refusal(f"runtime {self.runtime} has no network {network!r}", "network", self.networks)
        if spec.min_tier is not None and spec.min_tier.rank > self.tiers[0].rank:
            able = [one.runtime for one in CAPABILITIES.values() if one.tiers[0].rank >= spec.min_tier.rank]
            raise self._refusal(f"runtime {self.runtime} achieves {self.tiers[0]}", "min_tier", tuple(able), "runtime ")
        if spec.resources.memory_mb < self.least_memory_mb:
            raise RefusedError(
                f"runtime {self.runtime} needs {self.least_memory_mb} MB, not {spec.resources.memory_mb}",
                field="resources.memory_mb",
                remedy="allow more, or use native",
            )
        if spec.lifecycle.durable and not self.durable:
            raise self._refusal(f"sandboxes of {self.runtime} end with their Edge", "lifecycle.durable", ("native",))
        if spec.mounts and not self.mounts:
            raise self._refusal(
                f"runtime {self.runtime} shows nothing of the machine", "mounts", ("native",), "runtime "
            )
        if spec.resources.disk_driver != "auto" and self.disk_limit == "watched":
            raise self._refusal(f"runtime {self.runtime} has a disk of its own", "resources.disk_driver", ("auto",))

    def _refusal(self, what: str, field: str, ways: tuple[str, ...], kind: str = "") -> RefusedError:
        remedy = f"use {kind}{' or '.join(ways)}" if ways else "no runtime of this version does"
        return RefusedError(what, field=field, remedy=remedy)


_USER_NAMESPACE: Final = Tier.NAMESPACES_USERNS

CAPABILITIES: Final[dict[str, Capabilities]] = {
    one.runtime: one
    for one in (
        Capabilities(
            runtime="native",
            purpose="the default: our own launcher, under a millisecond, no daemon",
            tiers=(_USER_NAMESPACE,),
            needs="root, Linux 5.19",
            networks=("none", "allow", "open"),
            least_memory_mb=1,
            over_memory="command",
            over_pids="command",
            disk_limit="kernel",
            disk_inodes=True,
            durable=True,
            mounts=True,
            host_image=True,
            special_files=True,
            extended_attributes=True,
            frozen_cost="constant",
        ),
        Capabilities(
            runtime="runsc",
            purpose="gVisor: system calls never reach the machine's kernel",
            tiers=(Tier.GVISOR,),
            needs="what native needs, and runsc",
            networks=("none", "allow"),
            least_memory_mb=48,
            over_memory="sandbox",
            over_pids="sandbox",
            disk_limit="kernel",
            disk_inodes=True,
            durable=False,
            mounts=True,
            host_image=True,
            special_files=False,
            extended_attributes=False,
            frozen_cost="constant",
        ),
        Capabilities(
            runtime="docker",
            purpose="containers of a Docker Engine, where that is all there is",
            tiers=(Tier.NAMESPACES,),
            needs="root, Docker Engine 20.10 with overlay2 on this machine",
            networks=("none", "allow"),
            least_memory_mb=8,
            over_memory="command",
            over_pids="command",
            disk_limit="watched",
            disk_inodes=False,
            durable=False,
            mounts=True,
            host_image=True,
            special_files=True,
            extended_attributes=True,
            frozen_cost="size of the changes",
        ),
    )
}


def capabilities_of(runtime: str) -> Capabilities:
    """What `runtime` can do. Raises RefusedError for one that there is not."""
    if runtime not in CAPABILITIES:
        raise RefusedError(
            f"there is no runtime {runtime!r}", field="runtime", remedy=f"use one of {', '.join(CAPABILITIES)}"
        )
    return CAPABILITIES[runtime]


def achieved(spec: SandboxSpec, tier: Tier) -> None:
    """Raise RefusedError when what a runtime achieves on this machine is less than the spec demands."""
    if spec.min_tier is not None and tier.rank < spec.min_tier.rank:
        raise RefusedError(
            f"runtime {spec.runtime} achieves only {tier} on this machine",
            field="min_tier",
            remedy="see docs/runtimes.md for what achieves more",
        )


_ROWS: Final = (
    ("isolation tier", lambda one: " or ".join(one.tiers)),
    ("needs", lambda one: one.needs),
    ("network", lambda one: ", ".join(one.networks)),
    ("least memory", lambda one: f"{one.least_memory_mb} MB"),
    ("memory limit exceeded ends", lambda one: f"the {one.over_memory}"),
    ("a storm of forks ends", lambda one: f"the {one.over_pids}"),
    ("disk limit", lambda one: {"kernel": "a write beyond it fails", "watched": "ends the sandbox"}[one.disk_limit]),
    ("limit of files", lambda one: _yes(one.disk_inodes)),
    ("outlives its Edge", lambda one: _yes(one.durable)),
    ("mounts", lambda one: _yes(one.mounts)),
    ("image `host`", lambda one: _yes(one.host_image)),
    ("FIFOs and sockets in diffs", lambda one: _yes(one.special_files)),
    ("extended attributes", lambda one: _yes(one.extended_attributes)),
    ("diff, snapshot, fork cost", lambda one: one.frozen_cost),
)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def table() -> str:
    """The capabilities of all runtimes as a Markdown table."""
    runtimes = tuple(CAPABILITIES.values())
    lines = ["| | " + " | ".join(f"`{one.runtime}`" for one in runtimes) + " |"]
    lines.append("| --- |" + " --- |" * len(runtimes))
    lines += [f"| {name} | " + " | ".join(show(one) for one in runtimes) + " |" for name, show in _ROWS]
    return "\n".join(lines) + "\n"
