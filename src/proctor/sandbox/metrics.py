"""The numbers of Edges as Prometheus metrics (text exposition format 0.0.4).

An Edge gives a snapshot (`Edge.snapshot`); `exposition` shows any number of them, told apart by the label `edge`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from proctor.sandbox._meters import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "alive": "Sandboxes that live.",
    "durable": "Sandboxes that will outlive their Edge.",
    "paused": "Sandboxes whose processes stand still.",
    "running_commands": "Calls that are under way in sandboxes.",
    "creating": "Sandboxes that are being made, waiting for room included.",
    "ending": "Sandboxes of which something is left.",
    "pool_ready": "Launch slots that are ready.",
    "pool_wanted": "Launch slots that are kept ready.",
    "memory_promised_bytes": "Sum of the memory limits of living sandboxes.",
    "memory_available_bytes": "Memory of the machine that is available.",
    "cpus_promised": "Sum of the cpus of living sandboxes.",
    "pids_promised": "Sum of the process limits of living sandboxes.",
    "disk_promised_bytes": "Disk of the machine that is promised to living sandboxes.",
    "disk_free_bytes": "Free disk where sandboxes have theirs.",
    "frozen_layers": "Frozen uppers that are held.",
    "frozen_bytes": "Memory that frozen uppers hold.",
    "layer_cache_layers": "Layers in the image store.",
    "layer_cache_bytes": "Size of the layers in the image store.",
    "layer_cache_free_bytes": "Free disk where the image store is.",
    "open_files": "File descriptors of this process.",
}
_POOLS = {
    "ready": "Sandboxes of a warm pool that wait for a user.",
    "making": "Sandboxes of a warm pool that are being made.",
    "taken": "Sandboxes of a warm pool that were handed out and live.",
    "low": "Fewer ready ones than that, and the pool makes more.",
    "high": "As many ready ones as the pool makes.",
    "cap": "Sandboxes of the pool that may exist together by its doing.",
    "hits": "Creates that found one ready.",
    "misses": "Creates that found none ready.",
}
_COUNTERS = {
    "created": "Sandboxes that were made.",
    "adopted": "Sandboxes that were taken over from an earlier Edge.",
    "launcher_starts": "Launchers that were started; more than one an Edge means that one died.",
    "commands": "Commands and file operations.",
    "pauses": "Times that a sandbox was paused.",
}
_BY_REASON = {
    "failures": ("create_failures", "Sandboxes that could not be made."),
    "ends": ("ends", "Sandboxes that ended."),
    "command_reasons": ("commands_decided", "Commands that something else than themselves decided."),
}
_LATENCIES = {
    "admission": "Waiting for room.",
    "launch": "From room to a guest that answers.",
    "command": "Commands, from request to end.",
    "close": "Ending a sandbox, until its processes are gone.",
}


class _Snapshots(Collector):
    def __init__(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterable[Metric]:
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"proctor_sandbox_{name}", text, labels=["edge"])
            for one in self._snapshots:
                if name in one:
                    gauge.add_metric([one["edge"]], one[name])
            yield gauge
        for name, text in _POOLS.items():
            kind = CounterMetricFamily if name in ("hits", "misses") else GaugeMetricFamily
            family = kind(f"proctor_sandbox_warm_{name}", text, labels=["edge", "pool"])
            for one in self._snapshots:
                for number, pool in enumerate(one.get("pools", ())):
                    family.add_metric([one["edge"], str(number)], pool[name])
            yield family
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"proctor_sandbox_{name}", text, labels=["edge"])
            for one in self._snapshots:
                counter.add_metric([one["edge"]], one[name])
            yield counter
        for key, (name, text) in _BY_REASON.items():
            counter = CounterMetricFamily(f"proctor_sandbox_{name}", text, labels=["edge", "reason"])
            for one in self._snapshots:
                for reason, count in sorted(one[key].items()):
                    counter.add_metric([one["edge"], reason], count)
            yield counter
        for name, text in _LATENCIES.items():
            histogram = HistogramMetricFamily(f"proctor_sandbox_{name}_seconds", text, labels=["edge"])
            for one in self._snapshots:
                histogram.add_metric([one["edge"]], _buckets(one[name]["counts"]), one[name]["total_s"])
            yield histogram


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as the format has it."""
    bounds = [f"{bound:g}" for bound in BOUNDS_S] + ["+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


def exposition(snapshots: Sequence[Mapping[str, Any]]) -> bytes:
    """The page that a Prometheus server reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshots(snapshots))
    return generate_latest(registry)
