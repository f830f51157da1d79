"""`proctor image`: the whole life of an image on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.sandbox


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    root = tmp_path / "rootfs"
    (root / "etc").mkdir(parents=True)
    (root / "etc/motd").write_text("hello")
    return root


@pytest.fixture
def proctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PROCTOR_IMAGES", raising=False)

    def run(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "proctor", "image", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def test_import_list_remove_prune(proctor, rootfs: Path) -> None:  # type: ignore[no-untyped-def]
    made = json.loads(proctor("import", str(rootfs), "--ref", "mine:1", "--json"))
    assert (made["ref"], made["layers"], made["size_bytes"]) == ("mine:1", 1, 5)
    rows = json.loads(proctor("ls", "--json"))
    assert [(row["ref"], row["digest"]) for row in rows] == [("mine:1", made["digest"])]
    assert "mine:1" in proctor("ls")
    assert proctor("rm", "mine:1") == "removed mine:1\n"
    assert json.loads(proctor("prune", "--json"))["layers"] == 1
    assert proctor("ls").startswith("no images yet")


def test_the_host_image_is_built_without_a_download(proctor) -> None:  # type: ignore[no-untyped-def]
    assert proctor("build", "host").startswith("host  sha256:")


def test_an_unknown_image_names_the_known_ones(proctor) -> None:  # type: ignore[no-untyped-def]
    message = proctor("build", "nothing:1", code=4)
    assert "debian:bookworm" in message
    assert len(message.splitlines()) == 1


def test_a_recipe_that_is_wrong_is_bad_input(proctor, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "recipe.toml").write_text("schema = 1\n")
    assert "recipe.toml" in proctor("build", str(tmp_path / "recipe.toml"), code=4)


def test_an_import_of_nothing_is_one_line(proctor, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert len(proctor("import", str(tmp_path / "absent"), "--ref", "x:1", code=4).splitlines()) == 1


def test_progress_degrades_to_lines(proctor, rootfs: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = subprocess.run(
        [sys.executable, "-m", "proctor", "image", "import", str(rootfs), "--ref", "x:1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == f"[1/1] importing {rootfs}\n"
