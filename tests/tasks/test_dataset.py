"""Datasets: what may be pointed at, digests that are held to, and tasks that never go missing in silence."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from proctor.cli.main import main
from proctor.common import ConfigError, RefusedError
from proctor.tasks import load_any
from proctor.tasks.check import check_any
from proctor.tasks.harbor import import_harbor
from proctor.tasks.load import task_digest
from proctor.tasks.model import Carry
from proctor.tasks.toml_write import dump_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    MakeTask = Callable[..., Path]


@pytest.fixture
def folder(make_task: MakeTask, tmp_path: Path) -> Path:
    """Two tasks, `all/one` and `all/two`, and something else."""
    make_task(name="all/one")
    make_task(name="all/two")
    (tmp_path / "all/README.md").write_text("x")
    (tmp_path / "all/notes").mkdir()
    return tmp_path / "all"


def write_dataset(folder: Path, tasks: list[dict[str, Any]] | None = None, **extra: Any) -> Path:
    if tasks is None:
        tasks = [{"path": name, "digest": task_digest(folder / name)} for name in ("one", "two")]
    document = {"dataset": {"name": "set", "version": "1.2"}, "tasks": tasks, **extra}
    (folder / "dataset.toml").write_text(dump_toml(document))
    return folder / "dataset.toml"


def names(path: Path, **options: Any) -> list[str]:
    return [entry.task.name for entry in load_any(path, **options).entries]


def test_a_task_a_folder_and_a_dataset(folder: Path) -> None:
    assert names(folder / "one") == ["one"]
    assert names(folder) == ["one", "two"]
    file = write_dataset(folder)
    assert names(folder) == names(file) == ["one", "two"]
    dataset = load_any(file)
    assert (dataset.name, dataset.version, dataset.path) == ("set", "1.2", folder)
    assert [(entry.split, entry.weight) for entry in dataset.entries] == [("public", 1.0)] * 2


def test_a_dataset_may_name_tasks_that_live_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/dataset.toml").write_text("[dataset]\nname = 'a'\n[[tasks]]\npath = '../all/one'\n")
    assert names(tmp_path / "set", select=["one"]) == ["one"]


def test_splits_weights_and_overlays(folder: Path) -> None:
    tasks = [{"path": "one", "split": "private", "weight": 2.5}, {"path": "two", "proctor": {"carry": "live"}}]
    first, second = load_any(write_dataset(folder, tasks)).entries
    assert (first.split, first.weight) == ("private", 2.5)
    assert second.task.carry == Carry("live")


def test_an_overlay_may_name_a_recipe_beside_the_dataset(folder: Path) -> None:
    (folder / "base.toml").write_text("schema = 1\n")
    file = write_dataset(folder, [{"path": "one", "proctor": {"image": "base.toml"}}, {"path": "two"}])
    first, _ = load_any(file).entries
    assert first.task.environment.recipe == folder / "base.toml"
    assert check_any(file).errors == 0
    write_dataset(folder, [{"path": "one", "proctor": {"image": "no.toml", "cary": "live"}}])
    report = check_any(file)
    assert [(one.file, one.line, one.field) for one in report.problems if one.severity == "error"] == [
        ("dataset.toml", 7, "proctor.cary")
    ]


def test_a_selection_loads_only_what_it_names(folder: Path) -> None:
    (folder / "two/instruction.md").unlink()
    assert names(folder, select=["o*"]) == ["one"]
    assert names(folder, exclude=["two"]) == ["one"]
    assert names(folder, select=["!two"]) == ["one"]
    write_dataset(folder)
    assert names(folder, select=["one"]) == ["one"]
    with (folder / "one/task.toml").open("a") as file:
        file.write('[task]\nname = "org/first"\n')
    write_dataset(folder)
    assert names(folder, select=["org/*"]) == names(folder / "one", select=["one"]) == ["org/first"]
    with pytest.raises(ConfigError, match="no task is selected by two"):
        load_any(folder / "one", select=["two"])
    with pytest.raises(ConfigError, match="no task is selected by three"):
        load_any(folder, select=["three"])


def test_the_digest_of_a_dataset_follows_its_content(folder: Path) -> None:
    first = load_any(write_dataset(folder)).digest
    assert load_any(folder).digest == first
    assert load_any(write_dataset(folder, [{"path": "one"}, {"path": "two", "weight": 2.0}])).digest != first
    assert load_any(folder, select=["one"]).digest != first


def test_a_changed_task_is_an_error_that_names_both_digests(folder: Path) -> None:
    write_dataset(folder)
    before = task_digest(folder / "two")
    (folder / "two/tests/test.sh").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError) as caught:
        load_any(folder)
    assert before in str(caught.value)
    assert task_digest(folder / "two") in str(caught.value)
    assert "dataset.toml:11" in str(caught.value)


def test_every_task_that_cannot_be_loaded_is_listed(folder: Path) -> None:
    write_dataset(folder, [{"path": "one"}, {"path": "two"}, {"path": "three"}])
    (folder / "one/instruction.md").unlink()
    for path in (folder, folder / "dataset.toml"):
        with pytest.raises(ConfigError) as caught:
            load_any(path)
        assert "2 tasks cannot be loaded" in str(caught.value)
        assert "instruction.md" in str(caught.value)
        assert "three" in str(caught.value)


def test_refused_tasks_are_refused_not_wrong(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name / "trajectory.json").write_text("{}")
    with pytest.raises(RefusedError, match="2 tasks cannot be loaded"):
        load_any(folder)


def test_two_tasks_of_one_name(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name / "task.toml").write_text('[task]\nname = "org/same"\n')
    with pytest.raises(ConfigError, match="two tasks are named org/same"):
        load_any(folder)


BAD_DATASETS: dict[str, tuple[str, int, str]] = {
    "syntax": ("[dataset\n", 1, "not valid TOML"),
    "no-name": ("[dataset]\nversion = '1'\n", 1, "is missing"),
    "unknown-key": ("[dataset]\nname = 'a'\nnmae = 'b'\n", 3, "unknown key"),
    "unknown-task-key": ("[dataset]\nname = 'a'\n[[tasks]]\npath = 'one'\nwieght = 2\n", 5, "unknown key"),
    "split": ("[dataset]\nname = 'a'\n[[tasks]]\npath = 'one'\nsplit = 'secret'\n", 5, "'public'"),
    "weight": ("[dataset]\nname = 'a'\n[[tasks]]\npath = 'one'\nweight = -1\n", 5, "greater"),
    "digest": ("[dataset]\nname = 'a'\n[[tasks]]\npath = 'one'\ndigest = 'x'\n", 5, "pattern"),
    "absolute": ("[dataset]\nname = 'a'\n[[tasks]]\npath = '/one'\n", 4, "relative"),
    "twice": ("[dataset]\nname = 'a'\n[[tasks]]\npath = 'one'\n[[tasks]]\npath = 'one'\n", 6, "listed twice"),
    "registry": ("[dataset]\nname = 'a'\n[[tasks]]\nname = 'org/one'\n", 3, "a task of a registry cannot be honoured"),
    "no-path": ("[dataset]\nname = 'a'\n[[tasks]]\nweight = 1.0\n", 3, "is missing"),
    "files": ("[dataset]\nname = 'a'\n[[files]]\npath = 'metric.py'\n", 3, "cannot be honoured"),
    "version": ("schema_version = '2.0'\n[dataset]\nname = 'a'\n", 1, "1.0"),
}


@pytest.mark.parametrize("name", BAD_DATASETS)
def test_a_bad_dataset_gives_one_clear_error(folder: Path, name: str) -> None:
    text, line, words = BAD_DATASETS[name]
    (folder / "dataset.toml").write_text(text)
    report = check_any(folder)
    (error,) = [problem for problem in report.problems if problem.severity == "error"]
    assert (error.file, error.line) == ("dataset.toml", line)
    assert words in error.message
    with pytest.raises((ConfigError, RefusedError), match=f"dataset.toml:{line}"):
        load_any(folder)


@pytest.mark.parametrize(("path", "words"), [("nowhere", "does not exist"), ("empty", "holds no tasks")])
def test_what_holds_no_tasks(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=words):
        load_any(tmp_path / path)
    with pytest.raises(ConfigError, match=words):
        check_any(tmp_path / path)


def test_an_empty_dataset_holds_no_tasks(folder: Path) -> None:
    (folder / "dataset.toml").write_text("[dataset]\nname = 'a'\n")
    with pytest.raises(ConfigError, match="names no tasks"):
        load_any(folder)


# Import of Harbor tasks.


def test_harbor_tasks_are_copied_unchanged(folder: Path, tmp_path: Path) -> None:
    (folder / "two/steps/a").mkdir(parents=True)
    report = import_harbor(folder, tmp_path / "out")
    assert report.imported == ("one",)
    assert [one.name for one in report.unrunnable] == ["two"]
    assert task_digest(tmp_path / "out/one") == task_digest(folder / "one")
    dataset = load_any(tmp_path / "out")
    assert [entry.task.name for entry in dataset.entries] == ["one"]
    assert "several steps" in dataset.unrunnable[0].reason
    assert import_harbor(folder, tmp_path / "out").kept == ("one",)


def test_a_wrong_harbor_task_stops_the_import(folder: Path, tmp_path: Path) -> None:
    (folder / "two/instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"two/instruction\.md"):
        import_harbor(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The command line.


def test_check_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task", "check", str(folder)]) == 0
    assert "2 tasks, 0 errors, 0 warnings" in capsys.readouterr().out
    with (folder / "one/task.toml").open("a") as file:
        file.write("oops = 1\n")
    assert main(["task", "check", str(folder)]) == 4
    out = capsys.readouterr().out
    assert "one/task.toml:9" in out
    assert "agent.oops: unknown key" in out


def test_check_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder / "one/solution")
    assert main(["task", "check", "--json", str(folder)]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["tasks"], report["errors"], report["warnings"]) == (2, 0, 1)
    assert report["problems"][0]["rule"] == "no-solution"
    assert main(["task", "check", "--json", "--errors-only", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["problems"] == []


def test_import_and_digest_on_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["task", "import", "harbor", str(folder), "-o", str(tmp_path / "out")]) == 0
    assert "2 imported, 0 already there, 0 not runnable" in capsys.readouterr().out
    assert main(["task", "digest", str(tmp_path / "out/one")]) == 0
    assert capsys.readouterr().out.startswith(task_digest(folder / "one"))
    assert main(["task", "digest", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        str(folder / name): task_digest(folder / name) for name in ("one", "two")
    }
    assert main(["task", "digest", str(folder / "README.md")]) == 4
    assert main(["task", "import", "swe", str(folder), "-o", str(tmp_path / "swe")]) == 4
    assert "holds no SWE instances" in capsys.readouterr().err


# A disk that is full, a file that cannot be read.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.sandbox
@pytest.mark.parametrize("kind", ["harbor", "swe"])
def test_a_full_disk_is_one_clear_error_and_leaves_no_half_task(
    folder: Path, small_disk: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "two/tests/large").write_bytes(b"x" * 100_000)
    row = {"instance_id": "a__b-1", "repo": "a/b", "problem_statement": "x" * 100_000, "FAIL_TO_PASS": '["t"]',
           "PASS_TO_PASS": "[]", "image": "org/x@sha256:0", "log_parser": "parse_log_pytest",
           "eval_script": ": '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n"}  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    source = folder if kind == "harbor" else tmp_path / "rows.json"
    assert main(["task", "import", kind, str(source), "-o", str(small_disk / "out")]) == 6
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert message.count("\n") == 1
    assert "Traceback" not in message
    left = sorted(path.name for path in (small_disk / "out").iterdir())
    assert left == (["one"] if kind == "harbor" else [])


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "dataset.toml").mkdir()
    assert names(folder) == ["one", "two"]
    (folder / "loop.toml").symlink_to("loop.toml")
    write = folder / "one/tests/loop"
    write.symlink_to("loop")
    assert names(folder) == ["one", "two"]
