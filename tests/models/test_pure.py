"""The pure parts: event streams, assembly, prices, waiting times, specifications."""

from __future__ import annotations

import itertools
import json
import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.models import load_model
from proctor.models.reply import Assembler, cost_of, strict_json, usage_of, well_formed, whole_answer
from proctor.models.retry import CAP_S, delay_s, is_retried, retry_after_s
from proctor.models.sse import Event, EventDecoder

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


def decode(chunks: list[bytes]) -> list[Event]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)] + decoder.finish()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def delta(**fields: Any) -> str:
    return json.dumps({"model": "m-1", "choices": [{"index": 0, "delta": fields}]}, ensure_ascii=False)


def assemble(datas: list[str]) -> Any:
    assembler = Assembler()
    for data in datas:
        assembler.add(data)
    return assembler.answer()


line_ends = st.sampled_from(["\n", "\r\n", "\r"])
stream_lines = st.lists(
    st.one_of(
        st.just(""),
        st.just(": keep-alive"),
        st.text(st.characters(exclude_characters="\r\n\ufeff", exclude_categories=["Cs"])).map("data: {}".format),
        st.sampled_from(["event: error", "id: 7", "retry: 10", "data", "data:no space", "nonsense"]),
    ),
    max_size=20,
)


@given(stream_lines, line_ends, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_any_chunking_of_the_same_bytes_gives_the_same_events(
    lines: list[str], end: str, places: list[int], bom: bool
) -> None:
    data = (("\ufeff" if bom else "") + "".join(line + end for line in lines)).encode()
    whole = decode([data])
    assert decode(cut(data, places)) == whole
    assert decode([data[at : at + 1] for at in range(len(data))]) == whole


@given(stream_lines, st.sampled_from([("\n", "\r\n"), ("\n", "\r"), ("\r\n", "\r")]))
def test_line_ends_do_not_matter(lines: list[str], ends: tuple[str, str]) -> None:
    one, other = ("".join(line + end for line in lines).encode() for end in ends)
    assert decode([one]) == decode([other])


def test_an_event_of_several_lines() -> None:
    assert decode([b"event: note\ndata: a\ndata: b\n\n"]) == [Event("note", "a\nb")]


def test_an_event_without_its_blank_line_is_not_lost() -> None:
    assert decode([b"data: [DONE]"]) == [Event("message", "[DONE]")]


@given(
    st.text(max_size=60),
    st.lists(st.tuples(st.text(min_size=1, max_size=8), st.text(max_size=60)), max_size=4),
    st.lists(st.integers(0, 100_000), max_size=20),
    st.randoms(use_true_random=False),
)
def test_a_streamed_answer_is_the_whole_answer(
    text: str, calls: list[tuple[str, str]], places: list[int], rng: random.Random
) -> None:
    pieces = [delta(role="assistant", content="")]
    pieces += [delta(content=char) for char in text]
    queues = []
    for index, (name, arguments) in enumerate(calls):
        first = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        queues.append([first, *({"index": index, "function": {"arguments": char}} for char in arguments)])
    while any(queues):  # deltas of parallel calls may come in any interleaving
        queue = rng.choice([queue for queue in queues if queue])
        pieces.append(delta(tool_calls=[queue.pop(0)]))
    pieces.append(json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}))
    data = "".join(f": ping\n\ndata: {piece}\n\n" for piece in pieces).encode("utf-8", "surrogatepass")

    answer = assemble([event.data for event in decode(cut(data, places))])
    assert answer.text == text
    assert {(call.call_id, call.name, call.arguments) for call in answer.tool_calls} == {
        (f"c{index}", name, arguments) for index, (name, arguments) in enumerate(calls)
    }
    assert usage_of(answer.usage, None).prompt_tokens == 3


def test_calls_without_an_index_are_told_apart_by_id() -> None:
    answer = assemble(
        [
            delta(tool_calls=[{"id": "a", "function": {"name": "bash", "arguments": "{1"}}]),
            delta(tool_calls=[{"function": {"arguments": "}"}}]),
            delta(tool_calls=[{"id": "b", "function": {"name": "bash", "arguments": "{2}"}}]),
        ]
    )
    assert [(call.call_id, call.arguments) for call in answer.tool_calls] == [("a", "{1}"), ("b", "{2}")]


def test_parallel_calls_that_are_all_numbered_0() -> None:
    answer = assemble(
        [
            delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "bash", "arguments": "{}"}}]),
            delta(tool_calls=[{"index": 0, "id": "b", "function": {"name": "finish", "arguments": "{}"}}]),
        ]
    )
    assert [call.name for call in answer.tool_calls] == ["bash", "finish"]


def test_a_name_in_every_delta_is_one_name() -> None:
    piece = {"index": 0, "id": "a", "function": {"name": "bash", "arguments": "x"}}
    answer = assemble([delta(tool_calls=[piece]), delta(tool_calls=[piece])])
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("bash", "xx")]


def test_arguments_that_are_an_object_become_text() -> None:
    function = {"name": "bash", "arguments": {"command": "ls"}}
    answer = whole_answer({"choices": [{"message": {"content": None, "tool_calls": [{"function": function}]}}]})
    assert answer.tool_calls[0].arguments == '{"command": "ls"}'


def test_an_emoji_cut_in_two_by_the_endpoint_is_joined() -> None:
    first, second = (json.loads(delta(content="")) for _ in range(2))
    texts = [json.dumps(first).replace('""', '"\\ud83d"'), json.dumps(second).replace('""', '"\\ude00!"')]
    assert assemble(texts).text == "😀!"


def test_a_lone_surrogate_is_replaced() -> None:
    assert well_formed({"a": ["x\ud800y"]}) == {"a": ["x\ufffdy"]}


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e999", '{"a": -1e999}'])
def test_numbers_that_are_not_finite_are_not_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON number|out of range"):
        strict_json(text)


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert whole_answer({"choices": [{"message": {"content": parts}}]}).text == "ab"


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**6))
def test_cost_counts_cached_tokens_once(prompt: int, cached: int, completion: int) -> None:
    prices = {"prompt": 3.0, "cached": 3.0, "completion": 15.0}
    assert cost_of(prompt, cached, completion, prices) == pytest.approx((prompt * 3 + completion * 15) / 1e6)


@pytest.mark.parametrize(
    ("prompt", "cached", "completion", "prices"),
    [
        (None, None, 5, {"prompt": 1.0, "completion": 1.0}),
        (5, None, None, {"prompt": 1.0, "completion": 1.0}),
        (5, None, 5, None),
        (5, None, 5, {"prompt": 1.0}),
        (5, 3, 5, {"prompt": 1.0, "completion": 1.0}),
    ],
)
def test_a_cost_that_cannot_be_known_is_none(prompt: Any, cached: Any, completion: Any, prices: Any) -> None:
    assert cost_of(prompt, cached, completion, prices) is None


@pytest.mark.parametrize("count", [-1, 1.5, "7", True, None, [], float("nan"), float("inf")])
def test_a_strange_token_count_is_unknown(count: Any) -> None:
    assert usage_of({"prompt_tokens": count}, None).prompt_tokens is None


def test_retry_after_in_both_forms() -> None:
    assert retry_after_s("12", NOW) == 12
    assert retry_after_s(format_datetime(NOW + timedelta(seconds=90), usegmt=True), NOW) == 90
    assert retry_after_s(format_datetime(NOW - timedelta(seconds=90), usegmt=True), NOW) == 0


@pytest.mark.parametrize("value", [None, "", "soon", "nan", "inf", "1e999"])
def test_an_unreadable_retry_after_is_ignored(value: str | None) -> None:
    assert retry_after_s(value, NOW) is None


@given(st.integers(1, 10_000), st.one_of(st.none(), st.floats(0, 100)), st.integers())
def test_a_wait_is_bounded_and_never_less_than_asked_for(attempt: int, asked: float | None, seed: int) -> None:
    wait = delay_s(attempt, asked, random.Random(seed))
    assert (asked or 0) <= wait <= (asked or 0) + CAP_S


def test_waits_grow_and_are_spread() -> None:
    rng = random.Random(1)
    means = [sum(delay_s(attempt, None, rng) for _ in range(400)) / 400 for attempt in (1, 3, 5)]
    assert means[0] < means[1] < means[2]
    assert 0.2 < means[0] < 0.3


def test_which_statuses_are_tried_again() -> None:
    assert [status for status in range(400, 500) if is_retried(status)] == [408, 409, 429]
    assert not is_retried(501)
    assert is_retried(507)


def test_a_model_in_one_word() -> None:
    spec = load_model("qwen@3@http://127.0.0.1:8000/v1/")
    assert (spec.name, spec.base_url) == ("qwen@3", "http://127.0.0.1:8000/v1")
    assert (spec.temperature, spec.seed, spec.prices) == (0.0, 0, None)


def test_a_model_file(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(
        'name = "m"\nbase_url = "https://models.example/v1"\napi_key_env = "KEY"\ntemperature = 0.7\n'
        "[prices]\nprompt = 1.0\ncompletion = 2.0\n[extra_body]\nreasoning_effort = 'low'\n"
    )
    spec = load_model(str(path))
    assert spec.prices == {"prompt": 1.0, "completion": 2.0}
    assert spec.extra_body == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ('base_url = "http://h/v1"', "name"),
        ('name = "m"\nbase_url = "ftp://h"', "base_url"),
        ('name = "m"\nbase_url = "http://"', "base_url"),
        ('name = "m"\nbase_url = "http://u:p@h/v1"', "base_url"),
        ('name = "m"\nbase_url = "http://h/v1?key=1"', "base_url"),
        ('name = "m"\nbase_url = "http://h:x/v1"', "base_url"),
        ('name = "m"\nbase_url = "http://h/v1"\napi_key = "sk-1"', "api_key"),
        ('name = "m"\nbase_url = "http://h/v1"\ntemprature = 1', "temprature"),
        ('name = "m"\nbase_url = "http://h/v1"\ntemperature = nan', "temperature"),
        ('name = "m"\nbase_url = "http://h/v1"\n[extra_body]\nmodel = "other"', "extra_body.model"),
        ('name = "m"\nbase_url = "http://h/v1"\n[prices]\nprompt = 1', "prices.completion"),
        ("name = ", "not readable as TOML"),
    ],
)
def test_a_wrong_model_file_names_the_field(tmp_path: Path, content: str, field: str) -> None:
    path = tmp_path / "model.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    assert field in caught.value.line()
    assert "model.toml" in caught.value.line()


def test_neither_a_model_nor_a_file() -> None:
    with pytest.raises(ConfigError, match="neither name@http"):
        load_model("some-model")
