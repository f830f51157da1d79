"""Finding the line of a key, and writing TOML that reads back."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.tasks.toml_lines import TomlSyntaxError, key_lines, line_of, parse_toml
from proctor.tasks.toml_write import dump_toml

DOCUMENT = """\
# a comment with = and [brackets]
title = "a # b"  # not a comment before this
'quoted key' = 1
a.b."c.d" = 2
text = \"\"\"
[not.a.table]
x = 1
\"\"\"
raw = '''
y = "
'''
list = [ # comment ]
  "one", # ]
  { deep = [1, 2], other = "}" },
]
when = 1979-05-27 07:32:00

[table]
key = true
  [table.inner]
  key = 1.5

[[items]]
name = "first"
[items.sub]
x = 1
[[items]]
name = "second"
[[items.parts]]
y = 1
[[items.parts]]
y = 2
"""

LINES = {
    ("title",): 2,
    ("quoted key",): 3,
    ("a", "b", "c.d"): 4,
    ("text",): 5,
    ("raw",): 9,
    ("list",): 12,
    ("list", 0): 13,
    ("list", 1, "deep", 1): 14,
    ("list", 1, "other"): 14,
    ("when",): 16,
    ("table",): 18,
    ("table", "key"): 19,
    ("table", "inner"): 20,
    ("table", "inner", "key"): 21,
    ("items", 0): 23,
    ("items", 0, "name"): 24,
    ("items", 0, "sub", "x"): 26,
    ("items", 1, "name"): 28,
    ("items", 1, "parts", 0, "y"): 30,
    ("items", 1, "parts", 1): 31,
    ("items", 1, "parts", 1, "y"): 32,
}


@pytest.mark.parametrize("path", LINES, ids=str)
def test_every_kind_of_key_is_found(path: tuple[str | int, ...]) -> None:
    assert key_lines(DOCUMENT)[path] == LINES[path]


def test_an_absent_key_has_the_line_of_what_would_hold_it() -> None:
    lines = key_lines(DOCUMENT)
    assert line_of(lines, ("table", "inner", "missing", 3)) == 20
    assert line_of(lines, ("nowhere",)) is None


@pytest.mark.parametrize(
    ("data", "line"),
    [(b"a = 1\nb = \n", 2), (b"a = 1\n\n[a]\n", 3), (b"a = 1\nb = 'x", 2), (b"ok = 1\nbad = '\xff'\n", 2)],
)
def test_syntax_errors_have_a_line(data: bytes, line: int) -> None:
    with pytest.raises(TomlSyntaxError) as caught:
        parse_toml(data)
    assert caught.value.line == line


def test_nesting_without_end_is_an_error_and_no_crash() -> None:
    with pytest.raises(TomlSyntaxError):
        parse_toml(b"a = " + b"[" * 100_000)


def test_windows_line_ends() -> None:
    value, lines = parse_toml(b'a = 1\r\n[b]\r\nc = """x\r\ny"""\r\nd = 2\r\n')
    assert value["b"]["c"] == "x\ny"
    assert lines[("b", "d")] == 5


keys = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=8)
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=30),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    found = {path} if path else set()
    if isinstance(value, dict):
        for key, inner in value.items():
            found |= paths_of(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found |= paths_of(inner, (*path, index))
    return found


@given(st.dictionaries(keys, values, max_size=5))
def test_what_is_written_reads_back_and_every_key_has_a_line(document: dict[str, Any]) -> None:
    text = dump_toml(document)
    assert tomllib.loads(text) == document
    lines = key_lines(text)
    assert set(lines) == paths_of(document)
    assert all(1 <= line <= text.count("\n") for line in lines.values())
