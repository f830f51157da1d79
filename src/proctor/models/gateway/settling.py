"""The end of a call: what it used is counted in both budgets, what it was goes on record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from proctor.models.contract import ModelFault, Usage
from proctor.models.gateway.access import estimated, tokens_in
from proctor.models.gateway.body import Body
from proctor.models.gateway.calls import Begun, CallRecord
from proctor.models.reply import cost_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.models.gateway.exchange import Exchange
    from proctor.models.gateway.gateway import Gateway
    from proctor.models.gateway.reading import Reader

_STANDARD_TIERS = frozenset({None, "default", "standard", "auto"})


def settle(call: Exchange) -> None:
    """Count it and record it. An exception of the recorder is kept in the trial's access and raised."""
    usage = _usage(call)
    if call.reserved is not None:
        size = call.answer.size if call.answer is not None else 0
        # A call that the upstream refused or never saw has used nothing.
        spent = call.answer is not None or call.problem != ""
        guess = estimated(len(call.raw) if spent else 0, tokens_in(size) if spent else 0, call.tariff.amounts)
        counted = usage if spent else Usage(prompt_tokens=0, completion_tokens=0, cost_usd=0.0)
        for purse in (call.access.purse, call.gateway.run_purse):
            purse.settle(call.reserved, counted, guess)
            if purse.exceeded is not None:
                call.access.refused(purse.exceeded)
    call.access.seq += 1
    record = _record(call, usage)
    try:
        call.access.record(record)
    except BaseException as error:
        call.access.failure = error
        call.access.close()
        raise


def begun(call: Exchange) -> Begun:
    """What is known of a call before it goes upstream."""
    assert call.model is not None
    return Begun(
        number=call.number,
        at=call.at,
        operation=call.operation.name,
        asked_model=call.asked,
        upstream=call.model.upstream,
        pinned_model=call.model.id,
        request=call.clean,
    )


def _request(call: Exchange) -> Mapping[str, Any]:
    """What was asked, without a secret. They are looked for in the bytes: taking the values apart costs far more."""
    return call.values if call.clean is call.raw or not call.values else Body(call.clean).values


def _response(call: Exchange, reader: Reader | None) -> Mapping[str, Any] | None:
    """The answer as one object. The reader has seen it without the key; the trial's token is rarely in it."""
    if reader is None or reader.response is None:
        return None
    answer = call.answer
    assert answer is not None
    redact = call.access.redactor
    found = answer.body if not answer.is_stream else b"".join(answer.events)
    # A secret that came in pieces is in no event, but in what they add up to.
    if redact.raw(found) is found and not answer.is_stream:
        return reader.response
    clean: Mapping[str, Any] = redact.tree(call.gateway.redactor.tree(reader.response))
    return clean


def _usage(call: Exchange) -> Usage:
    """The counts that the upstream gave, with their cost. What it did not give is unknown."""
    if call.answer is None:
        return Usage()
    reader = call.answer.reader
    usage = reader.usage
    if reader.service_tier not in _STANDARD_TIERS or not call.operation.generates:
        return usage  # another tier has other prices, which nobody told us
    cost = cost_of(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, call.tariff.amounts,
                   cache_write=reader.cache_write_tokens)  # fmt: skip
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens, cost)


def _record(call: Exchange, usage: Usage) -> CallRecord:
    answer = call.answer
    reader = answer.reader if answer is not None else None
    if answer is not None and answer.is_stream:
        answer.reader.close()
    fault, error = _trouble(call, reader)
    redact = call.access.redactor
    now = anyio.current_time()
    if reader is not None and reader.response_id is not None and fault is None:
        call.access.response_ids.add(reader.response_id)
    clean = call.gateway.redactor
    return CallRecord(
        seq=call.access.seq,
        trial_id=call.access.trial_id,
        at=call.at,
        operation=call.operation.name,
        asked_model=call.asked,
        model=call.model.name if call.model else "",
        upstream=call.upstream.config.name if call.upstream else "",
        pinned_model=call.model.id if call.model else "",
        streamed=answer.is_stream if answer is not None else call.prepared.streamed,
        request=_request(call),
        changes=tuple(clean.text(redact.text(change)) for change in call.prepared.changes),
        removed=tuple(call.prepared.removed),
        status=call.status or None,
        response=_response(call, reader),
        stream=redact.raw(b"".join(answer.events)) if answer is not None and answer.is_stream else None,
        raw=_raw(call),
        returned_model=reader.returned_model if reader is not None else None,
        fingerprint=reader.fingerprint if reader is not None else None,
        usage=usage,
        cache_write_tokens=reader.cache_write_tokens if reader is not None else None,
        price_since=call.tariff.since,
        queued_s=call.queued_s,
        latency_s=now - answer.opened.began_at if answer is not None else None,
        first_token_s=answer.first_token_s if answer is not None else None,
        total_s=now - call.began_at,
        attempts=call.attempts,
        tries=tuple(call.tries),
        fault=fault,
        error=clean.text(redact.text(error)) if error else None,
        left=call.left,
        number=call.number,
        flags=(
            *call.flags,
            *(f"provider tool removed: {name}" for name in call.prepared.removed),
            *_drift(call, reader),
        ),
    )


def _raw(call: Exchange) -> bytes | None:
    """The bytes of an error, or of a reply that was no answer."""
    if call.error is not None:
        return call.access.redactor.raw(call.error)
    answer = call.answer
    if answer is not None and not answer.is_stream and answer.reader.response is None:
        return call.access.redactor.raw(answer.body)
    return None


def _trouble(call: Exchange, reader: Reader | None) -> tuple[ModelFault | None, str | None]:
    """What kept the answer from being one, and in which words."""
    if call.problem:
        return call.fault or ModelFault.CUT, call.problem
    if call.fault is not None:
        return call.fault, call.tries[-1].message if call.tries else str(call.fault)
    if reader is None:
        return ModelFault.CUT, "the call was cut off"
    if reader.fault is not None:
        return reader.fault, reader.problem
    if not reader.ended:
        return ModelFault.CUT, "the stream ended before the answer did"
    return None, None


def _drift(call: Exchange, reader: Reader | None) -> list[str]:
    """Whether the model that answered is the one that was pinned, or else the one that answered first in this run."""
    if reader is None or call.model is None or not call.operation.generates:
        return []
    found = []
    seen = (("model", call.model.returns, reader.returned_model),
            ("fingerprint", call.model.fingerprint, reader.fingerprint))  # fmt: skip
    for what, pinned, returned in seen:
        if returned is None:
            if pinned is not None and reader.ended:
                found.append(f"{what} unknown: {pinned} was pinned and the answer names none")
            continue
        expected = pinned or _first(call.gateway, call.model.name, what, returned)
        if returned != expected:
            found.append(f"{what} changed: {expected} → {returned}")
    return found


def _first(gateway: Gateway, model: str, what: str, returned: str) -> str:
    return gateway.pins.setdefault((model, what), returned)
