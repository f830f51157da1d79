"""Perturbations change the form and keep the meaning: what is not prose stays byte for byte."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.tasks.perturb import KINDS, can_change, check_kinds, perturb

DEMO = sorted((Path(__file__).resolve().parents[2] / "examples" / "demo").glob("*/instruction.md"))
CODE = (
    "Run `it is  not` and see. Do not touch \"it is\" or 'do not'.\n\n```sh\nit is  and do not\n- b\n- a\n```\n\n"
    "    it is the and\n\nWrite to /the/and it_is x.the 42 A=the https://the.example/and <the> and it is done.\n"
)
KEPT = [
    "`it is  not`", '"it is"', "'do not'", "```sh\nit is  and do not\n- b\n- a\n```", "    it is the and", "/the/and",
    "it_is", "42", "A=the", "https://the.example/and", "<the>",
]  # fmt: skip
PROSE = st.text(alphabet="abc the and is not\n-`'\"/_0.", max_size=120)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**31))
def test_code_and_quotes_stay(kind: str, seed: int) -> None:
    changed = perturb(CODE, (kind,), seed)
    for piece in KEPT:
        assert piece in changed


@pytest.mark.parametrize("kind", KINDS)
@given(text=PROSE, seed=st.integers(0, 99))
def test_a_seed_decides_and_words_that_are_not_on_a_list_stay(kind: str, text: str, seed: int) -> None:
    changed = perturb(text, (kind,), seed)
    assert changed == perturb(text, (kind,), seed)
    if kind in ("whitespace", "order"):
        assert Counter(changed.split()) == Counter(text.split())
    elif kind == "case":
        assert changed.lower() == text.lower()
    else:
        assert set(re.findall(r"[`\"/_0.]", text)) <= set(changed)


@pytest.mark.parametrize("path", DEMO, ids=lambda path: path.parent.name)
def test_real_instructions_keep_every_name_number_and_quote(path: Path) -> None:
    text = path.read_text()
    signs = re.compile(r"`[^`\n]+`|\S*[\d/_]\S*")
    for kind in ("whitespace", "case", "paraphrase", "noise"):
        assert can_change(text, (kind,))
        versions = {perturb(text, (kind,), seed) for seed in range(12)}
        assert len(versions) > (2 if kind != "paraphrase" else 1)
        for version in versions:
            assert not Counter(signs.findall(text)) - Counter(signs.findall(version)), kind


def test_only_unordered_lists_are_put_in_another_order() -> None:
    text = "Do this:\n\n1. one\n2. two\n\n- a\n  more of a\n- b\n- c\n\nlast line\n"
    versions = {perturb(text, ("order",), seed) for seed in range(30)}
    assert len(versions) == 6
    for version in versions:
        assert version.startswith("Do this:\n\n1. one\n2. two\n\n")
        assert "- a\n  more of a\n" in version
        assert version.endswith("\n\nlast line\n")
    assert not can_change("No list here.\n", ("order",))


def test_kinds_are_read_and_checked() -> None:
    assert check_kinds("case, noise") == ("case", "noise")
    for text, message in (("loud", "no perturbation"), ("case,case", "twice"), ("", "no perturbation")):
        with pytest.raises(ConfigError, match=message):
            check_kinds(text)
