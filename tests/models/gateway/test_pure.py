"""The pure parts of the gateway: events, bodies, rates, circuits, prices, redaction. Properties over real shapes."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.models.contract import Usage
from proctor.models.gateway.access import Purse, estimated
from proctor.models.gateway.body import REMOVED, BadBody, Body
from proctor.models.gateway.calls import REDACTED, Redactor
from proctor.models.gateway.config import Budgets, Circuit
from proctor.models.gateway.events import EventSplitter, fields_of
from proctor.models.gateway.limits import Breaker, Rate
from proctor.models.gateway.prices import Price, PriceTable
from proctor.models.gateway.spelling import other_spelling
from proctor.models.reply import cost_of
from proctor.models.sse import EventDecoder

LINES = st.sampled_from(
    [b"data: {}", b"data:x", b"event: a", b": comment", b"", b"data", b"id: 7", "data: ä€".encode(), b"data: [DONE]"]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.lists(st.tuples(LINES, ENDS), max_size=20).map(lambda lines: b"".join(a + b for a, b in lines))


@given(STREAMS, st.data())
def test_events_joined_again_are_the_stream_and_say_the_same_as_a_plain_reader(stream: bytes, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splitter = EventSplitter()
    events = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events += splitter.feed(stream[begin:end])
    rest = splitter.rest()
    assert b"".join(events) + rest == stream
    found = [fields_of(event) for event in [*events, rest]]
    plain = EventDecoder()
    expected = [(event.name, event.data.encode()) for event in [*plain.feed(stream), *plain.finish()] if event.data]
    assert [(name, text) for name, text in found if text] == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# A key like `N`, which some servers take for `n`, is refused; the tests of that are elsewhere.
OBJECTS = st.dictionaries(st.text(), JSON, max_size=6).filter(lambda value: other_spelling(value) is None)


@given(OBJECTS, st.booleans(), st.sampled_from([None, 2]))
def test_a_body_without_edits_is_the_same_bytes(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    try:
        body = Body(raw)
    except BadBody:
        assert not ascii_only  # a lone surrogate is no UTF-8
        return
    assert body.values == value
    assert body.edited({}) == raw


@given(OBJECTS, OBJECTS, st.sets(st.text()))
def test_an_edit_changes_what_it_names_and_nothing_else(
    value: dict[str, Any], edits: dict[str, Any], gone: set[str]
) -> None:
    raw = json.dumps(value, indent=1).encode()
    removed = {name: REMOVED for name in gone if name not in edits}
    assert json.loads(Body(raw).edited({**edits, **removed})) == {
        name: item for name, item in {**value, **edits}.items() if name not in removed
    }


@given(st.floats(1, 10_000), st.lists(st.floats(0, 5), min_size=1, max_size=200))
def test_a_rate_is_never_exceeded_over_any_minute(per_minute: float, gaps: list[float]) -> None:
    rate, now, starts = Rate(per_minute), 0.0, []
    for gap in gaps:
        now += gap
        starts.append(now + rate.reserve(now))
    assert starts == sorted(starts)
    burst = per_minute / 10 + 2
    for first, begin in enumerate(starts):
        within = sum(begin <= other < begin + 60 for other in starts[first:])
        assert within <= per_minute + burst


def test_a_circuit_opens_tries_once_and_closes() -> None:
    breaker = Breaker(Circuit(failures=3, open_s=10))
    for now in range(3):
        assert breaker.wait_s(now) == 0
        breaker.failed(now)
    assert breaker.wait_s(3) == pytest.approx(9)
    assert breaker.is_open(3)
    assert breaker.wait_s(13) == 0, "one try"
    assert breaker.wait_s(13) > 0, "and only one"
    breaker.failed(13.5)
    assert breaker.wait_s(14) > 9
    assert breaker.wait_s(24) == 0
    breaker.succeeded()
    assert [breaker.wait_s(24) for _ in range(3)] == [0, 0, 0]
    assert breaker.opened == 2


def test_a_try_that_never_came_back_does_not_keep_a_circuit_shut() -> None:
    breaker = Breaker(Circuit(failures=1, open_s=10))
    breaker.failed(0)
    assert breaker.wait_s(10) == 0
    assert breaker.wait_s(19) > 0
    assert breaker.wait_s(20) == 0


def test_the_price_of_a_day_is_the_latest_of_the_closest_name() -> None:
    def price(model: str, since: str, prompt: float) -> Price:
        return Price(model, date.fromisoformat(since), prompt, 1.0)

    table = PriceTable((price("m-*", "2026-01-01", 1), price("m-1", "2026-01-01", 2), price("m-1", "2026-06-01", 3)))
    found = {day: table.find("m-1", date.fromisoformat(day)) for day in ("2025-12-31", "2026-05-31", "2026-06-01")}
    assert [one.prompt if one else None for one in found.values()] == [None, 2, 3]
    other = table.find("m-2", date(2026, 12, 1))
    assert other is not None
    assert other.prompt == 1
    assert table.find("x", date(2026, 12, 1)) is None


def test_tokens_written_to_a_cache_have_a_price_of_their_own() -> None:
    prices = {"prompt": 1.0, "cached": 0.1, "completion": 10.0}
    assert cost_of(100, 40, 5, prices, cache_write=20) is None, "an unknown price is not zero"
    assert cost_of(100, 40, 5, {**prices, "cache_write": 2.0}, cache_write=20) == pytest.approx(
        (40 * 1 + 40 * 0.1 + 20 * 2 + 5 * 10) / 1e6
    )


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=30), st.integers(1, 2000))
def test_calls_one_after_the_other_overshoot_by_less_than_the_last(calls: list[tuple[int, int]], budget: int) -> None:
    purse = Purse("trial", Budgets(tokens=budget))
    for prompt, completion in calls:
        if purse.check() is not None:
            break
        before = purse.spent.tokens
        assert before <= budget
        estimate = estimated(10, 10, None)
        assert purse.fits(estimate), "alone a call always may"
        purse.begin(estimate)
        purse.settle(estimate, Usage(prompt, None, completion), estimate)
    assert (purse.exceeded is not None) == (purse.spent.tokens > budget)


SECRET = "sk-a/b+c=0123456789"


@given(JSON, st.integers(0, 3))
def test_no_secret_survives_redaction_anywhere(value: Any, where: int) -> None:
    redactor = Redactor([SECRET])
    planted: Any = [{SECRET: value}, {"x": [value, f"a{SECRET}b"]}, f"{SECRET}{SECRET}", {"k": {SECRET: SECRET}}][where]
    clean = redactor.tree(planted)
    assert SECRET not in json.dumps(clean)
    assert REDACTED in json.dumps(clean)
    for text in (json.dumps(planted), json.dumps(planted).replace("/", "\\/")):
        raw = redactor.raw(text.encode())
        assert SECRET.encode() not in raw
        assert SECRET.replace("/", "\\/").encode() not in raw
        json.loads(raw)
    assert redactor.tree("nothing") == "nothing"
