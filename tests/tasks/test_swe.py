"""Importing SWE instances: what is written, what never is, and what is told by name."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.grading.compat import PARSERS
from proctor.tasks import load_any, load_task, problems
from proctor.tasks.check import check_any
from proctor.tasks.model import Carry, Unrunnable
from proctor.tasks.schema import LogFormat
from proctor.tasks.swe import import_swe, is_swe_folder, plan_swe
from proctor.tasks.swe_rows import LOG_FORMATS

TEST_PATCH = "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-x\n+y\n"
ARCHIVE = b"not really an archive"

ROW: dict[str, Any] = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "1" * 40,
    "patch": "--- a/b.py\n+++ b/b.py\n@@ -1 +1 @@\n-x\n+secretfix\n",
    "test_patch": TEST_PATCH,
    "problem_statement": "It fails.\r\n\r\nSee `b.py`.",
    "hints_text": "secrethint",
    "created_at": "2020-01-02T03:04:05Z",
    "version": "1.0",
    "FAIL_TO_PASS": '["tests/test_a.py::test_new[(1,"]',
    "PASS_TO_PASS": '["tests/test_a.py::test_old"]',
    "environment_setup_commit": "2" * 40,
    "difficulty": "<15 min fix",
}

ENV: dict[str, Any] = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "1" * 40,
    "dataset": "Some-bench",
    "python": "3.11.7",
    "pip": "23.2.1",
    "requirements": ["pytest==7.4.4"],
    "environment": {"SETUPTOOLS_SCM_PRETEND_VERSION": "1.0"},
    "install_commands": ["cd REPO && python -m pip install -e . --no-deps --no-build-isolation"],
    "test_command": "pytest -rA tests/test_a.py",
    "log_format": "pytest-rA",
    "archive": {"file": "repo.tar.zst", "sha256": hashlib.sha256(ARCHIVE).hexdigest()},
    "notes": ["a note"],
}


def make_instance(folder: Path, row: dict[str, Any] | None = None, env: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "instance.json").write_text(json.dumps({**ROW, **(row or {})}))
    (folder / "env.json").write_text(json.dumps({**ENV, **(env or {})}))
    (folder / "repo.tar.zst").write_bytes(ARCHIVE)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_instance(tmp_path / "rows" / "a__b-1")
    (tmp_path / "rows" / "README.md").write_text("x")
    return tmp_path / "rows"


def test_a_task_is_written_whole(source: Path, tmp_path: Path) -> None:
    report = import_swe(source, tmp_path / "out")
    assert report.imported == ("a__b-1",)
    root = tmp_path / "out" / "a__b-1"
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == [
        "environment/recipe.toml",
        "environment/repo.tar.zst",
        "instruction.md",
        "solution/gold.patch",
        "solution/solve.sh",
        "task.toml",
        "tests/test.patch",
        "tests/tests.json",
    ]
    assert os.access(root / "solution/solve.sh", os.X_OK)
    task = load_task(root)
    tests = task.verifier.tests
    assert tests is not None
    assert task.instruction == ROW["problem_statement"]
    assert task.carry == Carry("patch", repo="/testbed")
    assert (task.name, task.instance_id, task.date) == ("a__b-1", "a__b-1", ROW["created_at"])
    assert (task.source, task.difficulty) == ("Some-bench", "<15 min fix")
    assert task.base_commit is None, "the recipe makes a commit of its own"
    assert task.metadata["base_commit"] == ROW["base_commit"]
    assert (tests.runner, tests.command, tests.cwd) == ("pytest", "pytest -rA tests/test_a.py", "/testbed")
    assert tests.env == ENV["environment"]
    assert tests.compat_log_format == "pytest-rA"
    assert tests.truncated_ids
    assert tests.protected == ("tests/test_a.py",)
    assert tests.timeout_s == 1800.0
    assert task.solution is not None
    assert task.solution.patch == root / "solution/gold.patch"
    assert [problem.rule for problem in problems(root)] == ["root-agent"]


def test_nothing_of_the_answer_is_where_the_agent_looks(source: Path, tmp_path: Path) -> None:
    import_swe(source, tmp_path / "out")
    root = tmp_path / "out" / "a__b-1"
    for path in root.rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert "secrethint" not in text
            if path.parent.name not in ("solution", "tests"):
                assert "secretfix" not in text
                assert "test_new" not in text


def test_the_recipe_says_how_the_environment_is_made(source: Path, tmp_path: Path) -> None:
    import_swe(source, tmp_path / "out")
    recipe = tomllib.loads((tmp_path / "out/a__b-1/environment/recipe.toml").read_text())
    assert recipe["python"] == "3.11"
    assert recipe["env"]["SETUPTOOLS_SCM_PRETEND_VERSION"] == "1.0"
    kinds = [next(iter(step)) for step in recipe["step"]]
    assert kinds == ["run", "write", "run", "unpack", "run", "git"]
    assert recipe["step"][3]["unpack"] == {
        "archive": "repo.tar.zst",
        "sha256": ENV["archive"]["sha256"],
        "to": "/testbed",
    }
    assert recipe["step"][4]["env"] == ENV["environment"]


def test_the_archive_is_not_copied_when_it_can_be_linked(source: Path, tmp_path: Path) -> None:
    import_swe(source, tmp_path / "out")
    place = tmp_path / "out/a__b-1/environment/repo.tar.zst"
    assert place.stat().st_ino == (source / "a__b-1/repo.tar.zst").stat().st_ino


def test_a_second_import_keeps_what_is_there_and_overwrites_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    import_swe(source, out)
    first = (out / "dataset.toml").read_bytes()
    assert import_swe(source, out).kept == ("a__b-1",)
    assert (out / "dataset.toml").read_bytes() == first
    (out / "a__b-1/instruction.md").write_text("mine\n")
    with pytest.raises(ConfigError, match="already there with other content"):
        import_swe(source, out)
    assert (out / "a__b-1/instruction.md").read_text() == "mine\n"
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


def test_a_first_line_that_looks_like_a_canary_stays(tmp_path: Path) -> None:
    statement = "# The canary deployment fails\nIt does.\n"
    make_instance(tmp_path / "rows/a__b-1", {"problem_statement": statement})
    import_swe(tmp_path / "rows", tmp_path / "out")
    assert load_task(tmp_path / "out/a__b-1").instruction == "\n" + statement


@pytest.mark.parametrize(
    ("log_format", "runner"),
    [("pytest-rA", "pytest"), ("django-runtests-verbosity2", "django"), ("sympy-bin-test-verbose", "sympy")],
)
def test_the_runner_follows_the_log_format(tmp_path: Path, log_format: str, runner: str) -> None:
    make_instance(tmp_path / "rows/a__b-1", env={"log_format": log_format})
    import_swe(tmp_path / "rows", tmp_path / "out")
    tests = load_task(tmp_path / "out/a__b-1").verifier.tests
    assert tests is not None
    assert (tests.runner, tests.compat_log_format) == (runner, log_format)


@pytest.mark.parametrize(
    ("created_at", "date"), [(1577934245000, None), ("last week", None), ("2020-01-02", "2020-01-02"), (None, None)]
)
def test_a_time_that_is_no_date_stays_out(tmp_path: Path, created_at: Any, date: str | None) -> None:
    make_instance(tmp_path / "rows/a__b-1", {"created_at": created_at, "version": 3.1})
    import_swe(tmp_path / "rows", tmp_path / "out")
    task = load_task(tmp_path / "out/a__b-1")
    assert task.date == date
    assert task.metadata["version"] == "3.1"


# Rows without what they need are named, and stay in the count.


def unrunnable_of(source: Path) -> tuple[Unrunnable, ...]:
    return plan_swe(source).unrunnable


def test_a_row_without_an_environment(tmp_path: Path) -> None:
    folder = make_instance(tmp_path / "rows/a__b-1")
    (folder / "env.json").unlink()
    (one,) = unrunnable_of(tmp_path / "rows")
    assert one.name == "a__b-1"
    assert "no environment" in one.reason


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}, "no test at all"),
        ({"FAIL_TO_PASS": '["t[(1,"]', "PASS_TO_PASS": '["t[(1,"]'}, "both in FAIL_TO_PASS and in PASS_TO_PASS"),
    ],
)
def test_a_row_whose_groups_make_no_sense(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    make_instance(tmp_path / "rows/a__b-1", row)
    (one,) = unrunnable_of(tmp_path / "rows")
    assert words in one.reason


def test_a_row_without_its_archive(tmp_path: Path) -> None:
    folder = make_instance(tmp_path / "rows/a__b-1")
    (folder / "repo.tar.zst").unlink()
    assert unrunnable_of(tmp_path / "rows") == (Unrunnable("a__b-1", "the archive repo.tar.zst is missing"),)


def test_an_environment_without_its_row(tmp_path: Path) -> None:
    folder = make_instance(tmp_path / "rows/a__b-1")
    make_instance(tmp_path / "rows/a__b-2", {"instance_id": "a__b-2"}, {"instance_id": "a__b-2"})
    (folder / "instance.json").unlink()
    plan = plan_swe(tmp_path / "rows")
    assert [task.name for task in plan.tasks] == ["a__b-2"]
    assert plan.unrunnable == (Unrunnable("a__b-1", "no instance.json in its folder"),)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"log_format": "karma"}, "log format karma"),
        ({"install_commands": ["make all"]}, "install command not understood: make all"),
    ],
)
def test_an_environment_that_is_not_understood(tmp_path: Path, env: dict[str, Any], words: str) -> None:
    make_instance(tmp_path / "rows/a__b-1", env=env)
    (one,) = unrunnable_of(tmp_path / "rows")
    assert words in one.reason


def test_unrunnable_rows_survive_into_the_dataset(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "instance_id": "a__b-2"}) + "\n")
    make_instance(tmp_path / "a__b-1")
    dataset = load_any(rows)
    assert [entry.task.name for entry in dataset.entries] == ["a__b-1"]
    assert [one.name for one in dataset.unrunnable] == ["a__b-2"]
    assert dataset.name == "rows"


# Rows of 5.x.

EVAL_SCRIPT = """#!/bin/bash
source /opt/miniconda3/bin/activate
conda activate testbed
export LANG='en_US.UTF-8'
export MODE=strict
export HOME_OF=$HOME
git apply -v - <<'EOF'
EOF
: '>>>>> Start Test Output'
pytest -rA tests/test_a.py
: '>>>>> End Test Output'
git checkout x tests/test_a.py
"""


def make_new_row(tmp_path: Path, **changes: Any) -> Path:
    row = {**ROW, "image": "org/eval.a__b-1@sha256:0", "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail",
           "eval_script": EVAL_SCRIPT, **changes}  # fmt: skip
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    return path


def test_a_row_with_an_image_and_an_evaluation_script(tmp_path: Path) -> None:
    import_swe(make_new_row(tmp_path), tmp_path / "out")
    task = load_task(tmp_path / "out/a__b-1")
    assert task.environment.image == "org/eval.a__b-1@sha256:0"
    assert task.verifier.tests is not None
    assert task.verifier.tests.command == "pytest -rA tests/test_a.py"
    env = dict(task.verifier.tests.env)
    assert env.pop("PATH").startswith("/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/sbin:")
    assert env == {"LANG": "en_US.UTF-8", "MODE": "strict", "CONDA_PREFIX": "/opt/miniconda3/envs/testbed"}


@pytest.mark.parametrize("parser", sorted(LOG_FORMATS))
def test_every_known_log_parser_is_one_that_the_compat_verdict_has(tmp_path: Path, parser: str) -> None:
    import_swe(make_new_row(tmp_path, log_parser=parser), tmp_path / "out")
    tests = load_task(tmp_path / "out/a__b-1").verifier.tests
    assert tests is not None
    assert (tests.runner, tests.compat_log_format) == LOG_FORMATS[parser]
    assert tests.compat_log_format in PARSERS


def test_the_log_formats_of_a_task_are_those_of_the_compat_verdict() -> None:
    assert set(get_args(LogFormat)) == set(PARSERS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"log_parser": "parse_log_karma"}, "log parser parse_log_karma"),
        ({"eval_type": "fail_only"}, "evaluation type fail_only"),
        ({"eval_script": "pytest"}, "no test command"),
        ({"eval_script": None}, "no environment"),
    ],
)
def test_a_new_row_that_is_not_understood(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (one,) = unrunnable_of(make_new_row(tmp_path, **changes))
    assert words in one.reason


# What is wrong stops the import before anything is written.


def test_every_bad_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bad = [{**ROW, "instance_id": "../x"}, {**ROW, "FAIL_TO_PASS": "oops"}, ROW]
    path.write_text("\n".join(map(json.dumps, bad)))
    with pytest.raises(ConfigError) as caught:
        import_swe(path, tmp_path / "out")
    assert "2 rows are wrong" in str(caught.value)
    assert "rows.jsonl:1" in str(caught.value)
    assert "rows.jsonl:2" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"instance_id": "other"}, "instance_id is 'other', but the row says 'a__b-1'"),
        ({"base_commit": "3" * 40}, "base_commit is"),
        ({"requirements": ["pytest>=7"]}, "not an exact pin"),
        ({"requirements": ["--index-url=http://x/"]}, "not an exact pin"),
        ({"archive": {"file": "../repo.tar", "sha256": "0" * 64}}, "archive.file"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_bad_environment_is_named(tmp_path: Path, env: dict[str, Any], words: str) -> None:
    make_instance(tmp_path / "rows/a__b-1", env=env)
    with pytest.raises(ConfigError) as caught:
        plan_swe(tmp_path / "rows")
    assert "env.json" in str(caught.value)
    assert words in str(caught.value)


def test_another_archive_than_the_recipe_names(source: Path, tmp_path: Path) -> None:
    (source / "a__b-1/repo.tar.zst").write_bytes(b"other")
    with pytest.raises(ConfigError, match=r"sha256 is .* but env\.json says"):
        import_swe(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_check_looks_at_the_archives(source: Path) -> None:
    assert check_any(source).problems == ()
    (source / "a__b-1/repo.tar.zst").write_bytes(b"other")
    (error,) = check_any(source).problems
    assert error.file == str(source / "a__b-1/repo.tar.zst")


def test_an_instance_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW))
    with pytest.raises(ConfigError, match=r"instance a__b-1 is also at .*rows\.jsonl:1"):
        plan_swe(path)


def test_one_instance_by_its_folder_or_its_row(source: Path) -> None:
    for path in (source / "a__b-1", source / "a__b-1/instance.json"):
        dataset = load_any(path)
        assert dataset.name == "a__b-1"
        assert [entry.task.name for entry in dataset.entries] == ["a__b-1"]


def test_what_holds_no_instances(tmp_path: Path) -> None:
    assert not is_swe_folder(tmp_path)
    with pytest.raises(ConfigError, match="holds no SWE instances"):
        plan_swe(tmp_path)


def test_progress_is_told(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    import_swe(source, tmp_path / "out", progress=lambda *step: seen.append(step))
    assert seen == [("a__b-1", 0, 1), ("", 1, 1)]


# Whatever a row says arrives unchanged.

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=60)
statements = texts.filter(lambda text: text.strip() != "")


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    statement=statements,
    fail_to_pass=st.lists(texts, unique=True, min_size=1, max_size=4),
    patch=statements,
    note=texts,
)
def test_a_row_survives_the_import(
    tmp_path: Path, statement: str, fail_to_pass: list[str], patch: str, note: str
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        row = {
            "problem_statement": statement,
            "FAIL_TO_PASS": json.dumps(fail_to_pass),
            "PASS_TO_PASS": "[]",
            "patch": patch,
        }
        make_instance(Path(name) / "rows/a__b-1", row, {"notes": [note], "test_command": note})
        import_swe(Path(name) / "rows", Path(name) / "out")
        task = load_task(Path(name) / "out/a__b-1")
        assert task.instruction.removeprefix("\n") == statement.removeprefix("\n")
        assert task.verifier.tests is not None
        assert task.verifier.tests.fail_to_pass == tuple(fail_to_pass)
        assert task.verifier.tests.command == note
        assert task.solution is not None
        assert task.solution.patch is not None
        assert task.solution.patch.read_bytes() == patch.encode()
        assert task.metadata["notes"] == [note]
