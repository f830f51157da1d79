"""A call of the model as the record holds it: from what the gateway saw to one line, and the sum of what was used."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from proctor.models.contract import ModelFault, Usage
from proctor.runs.formats import FindingEntry, ModelCallLine, UsageTotals, plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proctor.models.gateway import CallRecord

_FINDINGS: Mapping[str, Literal["note", "review"]] = {
    "model changed": "review",
    "fingerprint changed": "review",
    "model unknown": "review",
    "fingerprint unknown": "review",
    "fallback": "review",
    "provider tool removed": "note",
    "provider state refused": "note",
}
"""Which flags of a call are findings, and how grave."""


_DOWN = frozenset({ModelFault.UNREACHABLE, ModelFault.OVERLOADED, ModelFault.CUT})


def call_line(call: CallRecord) -> dict[str, Any]:
    """One line of `model-calls.jsonl`: the fields of a ModelCallLine that have a value. Every call passes here, so it
    is not validated (a test holds the two together)."""
    usage = {name: value for name in Usage.__slots__ if (value := getattr(call.usage, name)) is not None}
    if call.cache_write_tokens:
        usage["cache_write_tokens"] = call.cache_write_tokens
    line = dict(
        v=1,
        seq=call.seq,
        at=call.at,
        protocol=call.operation,
        requested_model=call.asked_model,
        pinned_model=call.pinned_model or None,
        returned_model=call.returned_model,
        fingerprint=call.fingerprint,
        upstream=call.upstream or None,
        request=call.request,
        changes=list(call.changes),
        status=call.status,
        streamed=call.streamed,
        response=call.response,
        stream=packed(call.stream) if call.stream is not None else None,
        raw=call.raw.decode("utf-8", "backslashreplace") if call.raw is not None else None,
        error=call.error,
        fault=str(call.fault) if call.fault is not None else None,
        attempts=call.attempts,
        tries=[plain(asdict(one)) for one in call.tries],
        queued_s=_seconds(call.queued_s),
        latency_s=_seconds(call.latency_s),
        first_token_s=_seconds(call.first_token_s),
        total_s=_seconds(call.total_s),
        usage=usage,
        price_since=call.price_since,
        flags=list(call.flags),
    )
    return {name: value for name, value in line.items() if value is not None}


def lost_line(begun: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a call that began (a `Begun`, as JSON) and of which nothing more was ever heard."""
    return ModelCallLine(
        seq=begun["number"],
        at=begun["at"],
        protocol=begun["protocol"],
        requested_model=begun["model"],
        pinned_model=begun["pinned"],
        upstream=begun["upstream"],
        request=begun["request"],
        error="the gateway ended before the answer did",
        fault=str(ModelFault.CUT),
    ).model_dump(exclude_none=True)


def packed(stream: bytes) -> str:
    """The bytes of a streamed answer, for one line of JSON: Zstandard, then base64. `unpacked` gives them back."""
    import zstandard

    return base64.b64encode(zstandard.ZstdCompressor(level=3).compress(stream)).decode("ascii")


def unpacked(text: str) -> bytes:
    """The bytes that `packed` took."""
    import zstandard

    return zstandard.ZstdDecompressor().decompress(base64.b64decode(text), max_output_size=1 << 28)


def findings_of(call: CallRecord) -> list[FindingEntry]:
    """What a call says about the conditions of the exam."""
    found = []
    for flag in call.flags:
        kind, _, detail = flag.partition(": ")
        if kind in _FINDINGS:
            found.append(
                FindingEntry(kind=kind.replace(" ", "-"), detail=detail, severity=_FINDINGS[kind], source="gateway")
            )
    return found


def usage_totals(calls: Iterable[tuple[Usage, bool]]) -> UsageTotals:
    """The sum over calls, given as (usage, whether the model was at work). A field that any of these calls left
    unknown is unknown in the sum."""
    used = [usage for usage, worked in calls if worked]

    def total(name: str) -> Any:
        values = [getattr(usage, name) for usage in used]
        return None if not values or None in values else sum(values)

    return UsageTotals(
        model_calls=len(used),
        prompt_tokens=total("prompt_tokens"),
        cached_tokens=total("cached_tokens"),
        completion_tokens=total("completion_tokens"),
        reasoning_tokens=total("reasoning_tokens"),
        cost_usd=total("cost_usd"),
    )


def was_at_work(call: CallRecord) -> bool:
    """Whether a model worked on a call. One that was refused, counted only, or never reached a model used nothing."""
    return call.operation != "count_tokens" and call.status == 200 and call.attempts > 0


def by_agent(call: CallRecord, *, answered_before: bool) -> bool:
    """Whether a call failed by what the agent did: it hung up, it asked for what the gateway refuses by itself, or an
    endpoint that has answered before now refuses what the agent made of the conversation."""
    return call.left or (call.fault is ModelFault.REFUSED and (answered_before or call.attempts == 0))


def is_down(call: CallRecord) -> bool:
    """Whether a call failed in a way that only the endpoint can bring about."""
    return call.fault in _DOWN


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
