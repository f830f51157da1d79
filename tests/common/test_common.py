"""Properties of the bottom layer: digests, canonical JSON, atomic files, ids."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.common import atomic_write, canonical_json, digest_json, digest_tree, new_id, state_dir

if TYPE_CHECKING:
    from pathlib import Path

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_canonical_json_reads_back(value: object) -> None:
    text = canonical_json(value).decode("utf-8", "surrogatepass")
    assert json.loads(text) == value


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_key_order_does_not_change_a_digest(value: dict[str, int]) -> None:
    assert digest_json(value) == digest_json(dict(reversed(value.items())))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_without_a_json_form_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"reward": number})


def tree(root: Path) -> Path:
    """A small tree with a file, a program, a folder and a link."""
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_bytes(b"content")
    (root / "program").write_bytes(b"#!/bin/sh\n")
    (root / "program").chmod(0o755)
    (root / "link").symlink_to("sub/file")
    return root


def test_a_copy_of_a_tree_has_the_same_digest_and_any_change_another(tmp_path: Path) -> None:
    first, second = tree(tmp_path / "a"), tree(tmp_path / "b")
    os.utime(second / "program", (1, 1))
    same = digest_tree(first)
    assert digest_tree(second) == same
    changes = [
        lambda: (second / "sub" / "file").write_bytes(b"Content"),
        lambda: (second / "program").chmod(0o644),
        lambda: ((second / "link").unlink(), (second / "link").symlink_to("program")),
        lambda: (second / "new").write_bytes(b""),
        lambda: (second / "sub" / "file").rename(second / "sub" / "other"),
    ]
    seen = {same}
    for change in changes:
        change()
        digest = digest_tree(second)
        assert digest not in seen
        seen.add(digest)


def test_ignored_names_do_not_count(tmp_path: Path) -> None:
    root = tree(tmp_path / "a")
    before = digest_tree(root, ignore=frozenset({"__pycache__"}))
    (root / "sub" / "__pycache__").mkdir()
    (root / "sub" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert digest_tree(root, ignore=frozenset({"__pycache__"})) == before


def test_a_killed_writer_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    atomic_write(target, b"old")
    code = (
        "import os, signal, sys; from pathlib import Path; import proctor.common.files as f\n"
        "os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "f.atomic_write(Path(sys.argv[1]), b'new' * 100000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert done.returncode == -9
    assert target.read_bytes() == b"old"


def test_a_failed_write_leaves_no_rubbish(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        atomic_write(target, b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_ids_are_unique_and_sort_by_birth() -> None:
    ids = [new_id("trial") for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(len(text) == len("trial-") + 20 for text in ids)
    early, late = new_id(), None
    while late is None or late[:9] == early[:9]:
        late = new_id()
    assert early < late


def test_state_dir_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path))
    assert state_dir() == tmp_path
