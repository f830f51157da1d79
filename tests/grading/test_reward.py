"""Reward files: what is a reward, and the long list of what is not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.grading.reward import BadReward, parse_json, parse_text


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), (" 0.5\n", 0.5), ("-1", -1.0), ("1e0", 1.0), ("+.5", 0.5), ("1.\r\n", 1.0)]
)
def test_text_with_one_finite_number(text: str, value: float) -> None:
    assert parse_text(text.encode()).values == {"reward": value}


@pytest.mark.parametrize(
    "text",
    ["", " \n", "nan", "NaN", "inf", "-inf", "Infinity", "1e999", "-1e999", "1_0", "0x1", "\uff11", "٣", "1 1", "1\n1",
     "true", "True", "one", "1,0", "1.0.0", "\ufeff1", "1\0", "\x1b[31m1", '"1"', "[1]", "1%", "--1", "e1", "1e"],
)  # fmt: skip
def test_text_that_is_no_reward(text: str) -> None:
    with pytest.raises(BadReward):
        parse_text(text.encode())


def test_json_with_finite_numbers() -> None:
    assert parse_json(b'{"a": 1, "b": 0.25}').values == {"a": 1.0, "b": 0.25}


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "1", "null", '{"reward": NaN}', '{"reward": Infinity}', '{"reward": -Infinity}',
     '{"reward": 1e999}', '{"reward": "1"}', '{"reward": true}', '{"reward": null}', '{"reward": [1]}',
     '{"reward": {"x": 1}}', '{"reward": 0, "reward": 1}', '{"reward": 1} {"reward": 1}', '{"reward": 1', "\ufeff{}",
     '{"reward": ' + "9" * 400 + "}", "[" * 100_000],
)  # fmt: skip
def test_json_that_is_no_reward(text: str) -> None:
    with pytest.raises(BadReward):
        parse_json(text.encode())


@pytest.mark.parametrize(
    ("text", "resolved"),
    [('{"reward": 1}', True), ('{"reward": 0.99}', False), ('{"a": 1, "b": 2}', True), ('{"a": 1, "b": 0}', False),
     ('{"reward": 1, "b": 0}', True)],
)  # fmt: skip
def test_resolved(text: str, resolved: bool) -> None:
    assert parse_json(text.encode()).resolved is resolved


@given(st.binary(max_size=200))
def test_whatever_is_accepted_is_finite(data: bytes) -> None:
    for parse in (parse_text, parse_json):
        try:
            rewards = parse(data)
        except BadReward:
            continue
        assert all(math.isfinite(value) for value in rewards.values.values())
