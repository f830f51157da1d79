"""Real tasks and rows that others wrote: each loads, and says what it is known to say."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import pytest

from proctor.common import RefusedError
from proctor.sandbox.images.recipe import load_recipe
from proctor.tasks import load_any, load_predictions, load_task, problems
from proctor.tasks.load import task_digest
from proctor.tasks.model import Carry
from proctor.tasks.rows import read_rows
from proctor.tasks.swe import import_swe, plan_swe
from proctor.tasks.swe_rows import parse_row

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.tasks.model import Dataset

pytestmark = pytest.mark.data

HARBOR = {
    # name: (memory, agent's and verifier's time limit, difficulty)
    "kv-store-grpc": (2048, 900.0, "medium"),
    "log-summary-date-ranges": (2048, 900.0, "medium"),
    "merge-diff-arc-agi-task": (4096, 900.0, "medium"),
    "multi-source-data-merger": (2048, 900.0, "medium"),
    "openssl-selfsigned-cert": (2048, 900.0, "medium"),
    "regex-log": (2048, 900.0, "medium"),
    "simple-task": (2048, 120.0, None),
    "sqlite-db-truncate": (2048, 900.0, "medium"),
}

SWE = {
    # name: (Python, runner, fail to pass, pass to pass, truncated ids)
    "django__django-11119": ("3.6", "django", 1, 7, 0),
    "django__django-11999": ("3.6", "django", 1, 30, 0),
    "mwaskom__seaborn-3190": ("3.9", "pytest", 1, 84, 0),
    "pallets__flask-4045": ("3.9", "pytest", 2, 50, 0),
    "pallets__flask-5063": ("3.11", "pytest", 2, 54, 2),
    "psf__requests-1142": ("3.9", "pytest", 1, 5, 0),
    "pytest-dev__pytest-7490": ("3.9", "pytest", 2, 78, 5),
    "pytest-dev__pytest-7982": ("3.9", "pytest", 1, 78, 0),
    "sphinx-doc__sphinx-8035": ("3.9", "pytest", 1, 2, 0),
    "sphinx-doc__sphinx-8265": ("3.9", "pytest", 1, 22, 12),
    "sympy__sympy-12481": ("3.9", "sympy", 1, 7, 0),
}


@pytest.mark.parametrize("name", HARBOR)
def test_harbor_tasks(shared_data: Path, name: str) -> None:
    memory_mb, timeout_s, difficulty = HARBOR[name]
    task = load_task(shared_data / "harbor" / name)
    assert task.name == name
    assert task.environment.memory_mb == memory_mb
    assert task.environment.storage_mb == 10240
    assert task.environment.dockerfile == task.path / "environment/Dockerfile"
    assert (task.agent_timeout_s, task.verifier.timeout_s) == (timeout_s, timeout_s)
    assert task.difficulty == difficulty
    assert task.verifier.kind == "reward"
    assert task.carry == Carry("filesystem")
    assert task.solution is not None
    assert "canary" not in task.instruction
    assert all(problem.severity == "warning" for problem in problems(task.path))


def test_the_multi_step_task_is_refused_by_name(shared_data: Path) -> None:
    with pytest.raises(RefusedError, match=r"task\.toml:34: steps: a task of several steps"):
        load_task(shared_data / "harbor" / "multi-step")


def test_the_harbor_folder_as_a_whole(shared_data: Path) -> None:
    with pytest.raises(RefusedError):
        load_any(shared_data / "harbor")
    dataset = load_any(shared_data / "harbor", exclude=["multi-step"])
    assert [entry.task.name for entry in dataset.entries] == sorted(HARBOR)


def test_the_service_task_is_graded_in_place_by_choice_of_the_dataset(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "kv-store-grpc").symlink_to(shared_data / "harbor" / "kv-store-grpc")
    digest = task_digest(shared_data / "harbor" / "kv-store-grpc")
    entry = f'path = "kv-store-grpc"\ndigest = "{digest}"\nproctor = {{ carry = "live" }}\n'
    (tmp_path / "dataset.toml").write_text(f'[dataset]\nname = "d"\n[[tasks]]\n{entry}')
    (loaded,) = load_any(tmp_path).entries
    assert loaded.task.carry == Carry("live")


@pytest.fixture
def swe(shared_data: Path) -> Dataset:
    return load_any(shared_data / "swe")


def test_every_swe_row_becomes_a_task(swe: Dataset) -> None:
    assert [entry.task.name for entry in swe.entries] == sorted(SWE)
    assert swe.unrunnable == ()


def test_swe_facts(swe: Dataset, shared_data: Path) -> None:
    for entry in swe.entries:
        task = entry.task
        python, runner, fail_to_pass, pass_to_pass, cut = SWE[task.name]
        observed = json.loads((shared_data / "swe" / task.name / "observed.json").read_text())
        env = json.loads((shared_data / "swe" / task.name / "env.json").read_text())
        tests = task.verifier.tests
        assert tests is not None
        assert tests.runner == runner
        assert (len(tests.fail_to_pass), len(tests.pass_to_pass)) == (fail_to_pass, pass_to_pass)
        assert (observed["n_f2p"], observed["n_p2p"]) == (fail_to_pass, pass_to_pass)
        ids = (*tests.fail_to_pass, *tests.pass_to_pass)
        assert sum(one.count("[") > one.count("]") for one in ids) == cut
        assert tests.truncated_ids == bool(cut)
        assert list(tests.protected) == env["test_files_in_test_patch"]
        assert tests.command == env["test_command"]
        assert tests.compat_log_format == env["log_format"]
        assert task.environment.recipe is not None
        recipe = load_recipe(task.environment.recipe)
        assert recipe.python == python
        assert len(recipe.steps) == 6


def test_nothing_but_the_problem_statement_is_told(swe: Dataset, shared_data: Path) -> None:
    for entry in swe.entries:
        row = json.loads((shared_data / "swe" / entry.task.name / "instance.json").read_text())
        assert entry.task.instruction == row["problem_statement"]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_the_same_rows_from_every_format(shared_data: Path, tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in sorted((shared_data / "swe").glob("*/instance.json"))
    ]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(rows))
    elif suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif suffix == ".csv":
        columns = sorted({name for row in rows for name in row})
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    parsed = [parse_row(row) for row in read_rows(path)]
    used = [{name: value for name, value in one.model_dump().items() if name != "hints_text"} for one in parsed]
    direct = [
        parse_row(read_rows(folder / "instance.json")[0])
        for folder in sorted((shared_data / "swe").iterdir())
        if folder.is_dir()
    ]
    known = [{name: value for name, value in one.model_dump().items() if name != "hints_text"} for one in direct]
    assert used == known
    plan = plan_swe(path, environments=shared_data / "swe")
    assert sorted(task.name for task in plan.tasks) == sorted(SWE)


def test_an_import_is_the_same_every_time(shared_data: Path, tmp_path: Path) -> None:
    first = import_swe(shared_data / "swe", tmp_path / "a")
    second = import_swe(shared_data / "swe", tmp_path / "b")
    assert first.imported == second.imported
    assert (tmp_path / "a/dataset.toml").read_bytes() == (tmp_path / "b/dataset.toml").read_bytes()


def test_published_patches_as_predictions(shared_data: Path, tmp_path: Path) -> None:
    patches = {path.parent.name: path.read_text() for path in (shared_data / "swe").glob("*/published_model.patch")}
    lines = [
        json.dumps({"instance_id": name, "model_patch": patch, "model_name_or_path": "m"})
        for name, patch in patches.items()
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    found = load_predictions(tmp_path / "p.jsonl")
    assert {name: one.patch for name, one in found.items()} == patches
