"""Patches made by us are what git applies, byte for byte."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.grading.deliverable import Change, FileState
from proctor.grading.diffing import LINK, make_patch

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TEXT = st.lists(st.sampled_from(["a\n", "b\n", "c\r\n", "é\u2028x\n", "--- a/x\n", "tail"]), max_size=12).map(
    lambda parts: "".join(parts).encode()
)
DATA = TEXT | st.binary(max_size=300)
FILE = st.builds(FileState, st.sampled_from([0o644, 0o755]), DATA)
LINKS = st.builds(FileState, st.just(LINK), st.sampled_from([b"x", b"../y"]))
STATE = st.none() | FILE | LINKS
NAMES = st.sampled_from(["a", "dir/b", "sp ace", 'quo"te', "tab\tx", "ünï", "n\newline"])


def put(root: Path, path: str, state: FileState | None) -> None:
    if state is None:
        return
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if state.mode == LINK:
        os.symlink(state.data, os.fsencode(target))
    else:
        target.write_bytes(state.data)
        target.chmod(state.mode)


def tree(root: Path) -> dict[str, FileState]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.startswith(".git"):
            continue
        if path.is_symlink():
            found[name] = FileState(LINK, os.fsencode(os.readlink(path)))
        elif path.is_file():
            found[name] = FileState(path.stat().st_mode & 0o755, path.read_bytes())
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, st.tuples(STATE, STATE), min_size=1))
def test_git_applies_what_we_write(tmp_path_factory: pytest.TempPathFactory, files: dict[str, tuple]) -> None:
    root = tmp_path_factory.mktemp("repo")
    changes = [Change(name, before, after) for name, (before, after) in files.items()]
    for name, (before, _) in files.items():
        put(root, name, before)
    patch = make_patch(changes)
    if not patch:
        return
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=root,
        input=patch.encode("utf-8", "surrogateescape"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, (done.stderr, patch)
    assert tree(root) == {name: after for name, (_, after) in files.items() if after is not None}


def test_no_change_is_no_patch() -> None:
    state = FileState(0o644, b"x")
    assert make_patch([Change("a", state, state)]) == ""
