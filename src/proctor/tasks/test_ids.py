"""Test ids as datasets write them: some were cut at the first space by a log parser."""

from __future__ import annotations


def is_truncated(test_id: str) -> bool:
    """Whether an id opens a parameter bracket that it never closes (`test_unparse[(1,`).

    In SWE-bench's data such an id stands for every test whose full id begins with it.
    """
    return test_id.count("[") > test_id.count("]")
