"""Receipts: what a sandbox really was, as the host observed it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from proctor.sandbox.contract import EndReason, Image, Layer, Receipt, SandboxSpec, Stats, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@cache
def kernel() -> str:
    """The machine's kernel, which sandboxes share with it or are built upon."""
    info = os.uname()
    return f"{info.sysname} {info.release} {info.machine}"


@dataclass(slots=True)
class Peaks:
    """The most that a sandbox ever used, over all of its incarnations."""

    memory_bytes: int = 0
    pids: int = 0
    disk_bytes: int = 0
    disk_inodes: int = 0
    cpu_s: float = 0.0
    oom_kills: int = 0
    pids_refused: int = 0

    def with_current(self, stats: Stats | None) -> dict[str, Any]:
        """These peaks with the counters of a living incarnation added in."""
        total = Peaks(*(getattr(self, name) for name in self.__slots__))
        if stats is not None:
            total.add(stats)
        return {name: getattr(total, name) for name in self.__slots__}

    def add(self, stats: Stats) -> None:
        """Add the last counters of an incarnation that has ended."""
        self.memory_bytes = max(self.memory_bytes, stats.memory_peak_bytes or stats.memory_bytes)
        self.pids = max(self.pids, stats.pids_peak or stats.pids)
        self.disk_bytes = max(self.disk_bytes, stats.disk_bytes)
        self.disk_inodes = max(self.disk_inodes, stats.disk_inodes)
        self.cpu_s += stats.cpu_s
        self.oom_kills += stats.oom_kills
        self.pids_refused += stats.pids_refused


@runtime_checkable
class Evident(Protocol):
    """An incarnation that can say what the kernel knows about its end."""

    def evidence(self) -> dict[str, Any]:
        """Facts of the kernel, asked when its guest is dead and its counters are still there."""
        ...


@dataclass(slots=True)
class History:
    """What a sandbox's receipt is made of, collected while it lives."""

    sandbox_id: str
    spec: SandboxSpec
    image: Image
    created_at: str
    tier: Tier
    kernel: str
    mechanisms: Mapping[str, str] = field(default_factory=dict)
    peaks: Peaks = field(default_factory=Peaks)
    execs: int = 0
    incarnation: int = 0
    adopted: int = 0
    """How often another Edge has taken it over."""
    ended_at: str | None = None
    end_reason: EndReason | None = None
    end_detail: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    network: str = "none"
    self_test: Mapping[str, Any] = field(default_factory=dict)
    decisions: Callable[[], Mapping[str, Any]] = dict

    def receipt(self, layers: tuple[Layer, ...], stats: Stats | None) -> Receipt:
        """The receipt as of now; `stats` are those of the living incarnation, if there is one."""
        resources = self.spec.resources
        return Receipt(
            sandbox_id=self.sandbox_id,
            runtime=f"{self.spec.backend}/{self.spec.runtime}",
            tier=self.tier,
            kernel=self.kernel,
            image_ref=self.image.ref,
            image_digest=self.image.digest,
            layer_digests=tuple(layer.digest or layer.handle or str(layer.path) for layer in layers),
            limits={
                "cpus": resources.cpus,
                "memory_mb": resources.memory_mb,
                "disk_mb": resources.disk_mb,
                "disk_inodes": resources.disk_inodes,
                "pids": resources.pids,
                "ttl_s": self.spec.lifecycle.ttl_s,
                "idle_timeout_s": self.spec.lifecycle.idle_timeout_s,
                "pause_after_s": self.spec.lifecycle.pause_after_s,
            },
            limit_mechanisms=dict(self.mechanisms),
            network=self.network,
            created_at=self.created_at,
            ended_at=self.ended_at,
            end_reason=self.end_reason,
            end_detail=self.end_detail,
            end_evidence=dict(self.evidence) if self.end_reason is not None else {},
            peaks=self.peaks.with_current(stats),
            execs=self.execs,
            incarnation=self.incarnation,
            labels=dict(self.spec.labels),
            network_decisions=self.decisions(),
            self_test=dict(self.self_test),
        )
