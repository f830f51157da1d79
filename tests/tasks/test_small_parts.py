"""The small parsers: ignore files, patches, host variables, canaries, truncated ids."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.tasks.hostenv import resolve
from proctor.tasks.ignorefile import is_ignored, parse_rules, visible_directory
from proctor.tasks.instruction import strip_canary
from proctor.tasks.patches import patch_paths
from proctor.tasks.test_ids import is_truncated

IGNORE = """\
# comment
*.log
!keep.log
/top.txt
build/
docs/*.md
**/deep/x
a/**/z
[ab].c
file\\#1
\\!bang
"""

NAMES = [
    "a.log", "sub/a.log", "keep.log", "top.txt", "sub/top.txt", "build/out", "sub/build/out", "docs/a.md",
    "docs/sub/a.md", "deep/x", "p/q/deep/x", "a/z", "a/b/c/z", "a.c", "c.c", "file#1", "!bang", "build.txt",
    "other",
]  # fmt: skip


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_ignore_files_mean_what_git_means(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / ".harborignore").write_text(IGNORE)
    seen = {str(path.relative_to(v)) for v in [visible_directory(folder)] for path in v.rglob("*") if path.is_file()}
    (folder / ".gitignore").write_text(IGNORE)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    command = ["git", "-C", str(folder), "ls-files", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    assert seen == {name for name in listed if name} - {".gitignore", ".harborignore"}


def test_a_directory_without_an_ignore_file_is_used_as_it_is(tmp_path: Path) -> None:
    assert visible_directory(tmp_path) == tmp_path


def test_the_last_rule_decides() -> None:
    rules = parse_rules("*.txt\n!a.txt\na.txt\n")
    assert is_ignored(rules, "a.txt", is_directory=False)
    assert not is_ignored(rules, "a.md", is_directory=False)


PATCH = """diff --git a/src/a.py b/src/a.py
index 1..2 100644
--- a/src/a.py
+++ b/src/a.py
@@ -1,3 +1,3 @@
 x
--- a/not/a/header
+++ b/neither/this
 y
diff --git a/old name.txt b/new name.txt
similarity index 100%
rename from old name.txt
rename to new name.txt
diff --git a/gone.py b/gone.py
deleted file mode 100644
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-x
diff --git a/empty.txt b/empty.txt
new file mode 100644
diff --git "a/na\\303\\257ve.py" "b/na\\303\\257ve.py"
--- "a/na\\303\\257ve.py"
+++ "b/na\\303\\257ve.py"
@@ -0,0 +1 @@
+x
"""


def test_the_files_of_a_patch() -> None:
    expected = ("src/a.py", "old name.txt", "new name.txt", "gone.py", "empty.txt", "naïve.py")
    assert patch_paths(PATCH) == expected


def test_the_files_of_a_patch_without_git_lines() -> None:
    assert patch_paths("--- a/x.py\t2020-01-01\n+++ b/x.py\t2020-01-02\n@@ -1 +1 @@\n-1\n+2\n") == ("x.py",)
    assert patch_paths("--- old/tests/x.py\n+++ new/tests/x.py\n@@ -1 +1 @@\n-1\n+2\n") == ("tests/x.py",)
    assert patch_paths("--- x.py\n+++ x.py\n@@ -1 +1 @@\n-1\n+2\n") == ("x.py",)
    assert patch_paths("diff --git i/x.py w/x.py\nold mode 100644\nnew mode 100755\n") == ("x.py",)
    assert patch_paths("") == ()
    assert patch_paths("no patch at all\n") == ()


@given(st.text(alphabet='+-@ a/b\n"\\0', max_size=200))
def test_no_text_breaks_the_patch_reader(text: str) -> None:
    assert all(isinstance(path, str) for path in patch_paths(text))


@pytest.mark.parametrize(
    ("text", "value", "missing"),
    [
        ("plain", "plain", []),
        ("${A}", "1", []),
        ("${A}-${B:-x}", "1-x", []),
        ("${EMPTY:-x}", "x", []),
        ("${EMPTY}", "", []),
        ("${B}", "", ["B"]),
        ("$A {A} ${} ${1}", "$A {A} ${} ${1}", []),
        ("${B:-}", "", []),
    ],
)
def test_host_variables(text: str, value: str, missing: list[str]) -> None:
    assert resolve(text, {"A": "1", "EMPTY": ""}) == (value, missing)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("do it\n", "do it\n"),
        ("<!-- x-canary GUID 1 -->\n\ndo it\n", "do it\n"),
        ("# Canary\n# canary 2\n \ndo\n", "do\n"),
        ("\n# canary\ndo\n", "\n# canary\ndo\n"),
        ("# Title\n# canary\n", "# Title\n# canary\n"),
        ("the canary sings\n", "the canary sings\n"),
        ("# canary\r\n\r\ndo\r\n", "do\r\n"),
        ("", ""),
    ],
)
def test_canaries(text: str, left: str) -> None:
    assert strip_canary(text) == left


@pytest.mark.parametrize(
    ("test_id", "cut"),
    [
        ("tests/test_a.py::test_unparse[(1,", True),
        ('tests/test_cli.py::test_locate_app[cliapp.factory-create_app2("foo",', True),
        ("tests/test_a.py::test_x[a]", False),
        ("tests/test_a.py::test_x[a[b]", True),
        ("tests/test_a.py::test_x[[]]", False),
        ("test_method (module.Class)", False),
        ("bare_name", False),
    ],
)
def test_truncated_ids(test_id: str, cut: bool) -> None:
    assert is_truncated(test_id) is cut


names = st.text(st.sampled_from('ab-+ .ü"\\\t@'), min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
trees = st.dictionaries(
    st.one_of(names, st.tuples(names, names).map("/".join)),
    st.lists(st.sampled_from(["x", "--- a/no", "+++ b/no", "", "@@ -1 +1 @@", "diff --git a/q b/q"]), max_size=5),
    max_size=4,
)


def fits(tree: dict[str, list[str]]) -> bool:
    """Whether no file is also a directory."""
    folders = {name.split("/")[0] for name in tree if "/" in name}
    return not any(name in folders for name in tree)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=trees.filter(fits), after=trees.filter(fits))
def test_the_files_of_a_patch_are_those_that_git_sees(
    tmp_path: Path, before: dict[str, list[str]], after: dict[str, list[str]]
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as place:
        root = Path(place)
        subprocess.run(["git", "init", "-q", "--template=", place], check=True)
        for tree in (before, after):
            for path in root.iterdir():
                if path.name != ".git":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            for name, lines in tree.items():
                (root / name).parent.mkdir(exist_ok=True)
                (root / name).write_text("".join(f"{line}\n" for line in lines))
            if tree is before:
                subprocess.run(["git", "-C", place, "add", "-A", "-f"], check=True)
        subprocess.run(["git", "-C", place, "add", "-A", "-N", "-f"], check=True)
        run = ["git", "-C", place, "diff", "--no-renames"]
        patch = subprocess.run(run, check=True, capture_output=True).stdout.decode("utf-8", "surrogateescape")
        listed = subprocess.run([*run, "--name-only", "-z"], check=True, capture_output=True).stdout.decode()
        assert set(patch_paths(patch)) == {name for name in listed.split("\0") if name}
