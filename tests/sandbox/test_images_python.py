"""Pythons: which image a series means, toolkits from this machine, the pytest toolkit, Debian bases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from proctor import sandbox
from proctor.sandbox.contract import ImageError, SandboxSpec
from proctor.sandbox.images import PYTEST_HOME, ImageStore, ensure_image, pytest_toolkit, python_base
from proctor.sandbox.images.debian import build_debian, clean_system
from proctor.sandbox.images.python import (
    FoundPython,
    choose_python,
    find_pythons,
    python_places,
    series_of,
    toolkit_image,
)

HERE = Path("/opt")


def found(*versions: str) -> list[FoundPython]:
    return [FoundPython(HERE / version, version) for version in versions]


def test_the_exact_version_wins_over_a_newer_one() -> None:
    assert choose_python("3.6.9", found("3.6.15", "3.6.9", "3.7.1")).version == "3.6.9"


def test_otherwise_the_newest_of_the_series() -> None:
    assert choose_python("3.6", found("3.6.9", "3.6.15", "3.10.1")).version == "3.6.15"
    assert choose_python("3.6.1", found("3.6.9", "3.6.15")).version == "3.6.15"


def test_a_series_that_is_nowhere_is_named() -> None:
    with pytest.raises(ImageError, match=r"no Python 3\.5 .*PROCTOR_PYTHONS"):
        choose_python("3.5.2", found("3.6.9", "3.15.2"))


def test_series_of() -> None:
    assert [series_of(text) for text in ("3.9", "3.9.18", "3.10.1")] == ["3.9", "3.9", "3.10"]


def test_places_come_from_the_environment_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "versions/3.6.15").mkdir(parents=True)
    monkeypatch.setenv("PROCTOR_PYTHONS", f"{tmp_path}/versions/*:/opt/mine")
    assert python_places()[:2] == [tmp_path / "versions/3.6.15", Path("/opt/mine")]


def test_something_that_is_no_python_is_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3.6").write_text("#!/bin/sh\necho Python 3.6.15\nexit 1\n")
    (tmp_path / "bin/python3.6").chmod(0o755)
    monkeypatch.setenv("PROCTOR_PYTHONS", str(tmp_path))
    assert tmp_path not in [item.prefix for item in find_pythons()]


def test_cleaning_removes_what_differs_from_build_to_build(tmp_path: Path) -> None:
    for name in ("var/log/apt", "var/lib/apt/lists", "tmp", "etc"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("var/log/apt/history.log", "var/lib/apt/lists/x", "tmp/x", "etc/passwd-"):
        (tmp_path / name).write_text("x")
    (tmp_path / "etc/machine-id").write_text("0123")
    clean_system(tmp_path)
    assert list((tmp_path / "var/log").iterdir()) == list((tmp_path / "var/lib/apt/lists").iterdir()) == []
    assert (tmp_path / "etc/machine-id").read_bytes() == b""
    assert not (tmp_path / "etc/passwd-").exists()


BUILDS = [pytest.mark.sandbox, pytest.mark.images, pytest.mark.slow, pytest.mark.anyio]


class TestBuilds:
    pytestmark = BUILDS

    @pytest.mark.parametrize(("wanted", "ref"), [("3.9.18", "debian:bullseye"), ("3.11", "debian:bookworm")])
    async def test_a_series_of_debian_is_debian_s(self, wanted: str, ref: str) -> None:
        store = ImageStore()
        base = await python_base(wanted, store=store)
        assert (base.ref, base.python) == (ref, "/usr/bin/python3")
        async with sandbox.create(SandboxSpec(image=store.resolve(base.ref))) as box:
            assert (await box.exec([base.python, "-V"])).text.startswith(f"Python {series_of(wanted)}.")

    async def test_another_series_is_a_toolkit_that_works(self, tmp_path: Path) -> None:
        others = [item for item in find_pythons() if series_of(item.version) not in ("3.9", "3.11", "3.13")]
        modern = [item for item in others if item.version.startswith("3.")]
        if not modern:
            pytest.skip("this machine has no Python of a series that no Debian release has (see PROCTOR_PYTHONS)")
        store = ImageStore()
        debian = await ensure_image("debian:bookworm", store=store)
        base = await toolkit_image(modern[0].version, debian, store=store)
        image = store.resolve(base.ref)
        assert image.layers[0] == debian.layers[0]
        script = "import ssl, sqlite3, zlib, bz2, lzma, ctypes, venv, sys; print(sys.version.split()[0], sys.prefix)"
        async with sandbox.create(SandboxSpec(image=image)) as box:
            result = await box.exec([base.python, "-c", script])
            version = modern[0].version
            assert result.text.split() == [version, f"/opt/python/{version}"], result.error_text
            assert (await box.exec(f"{base.python} -m venv /venv && /venv/bin/pip --version")).ok
            assert (await box.exec("grep -rlI pyenv /opt/python/*/bin")).text == ""

    @pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed")
    async def test_a_debian_image_is_the_same_when_it_is_built_again(self, tmp_path: Path) -> None:
        known = await ensure_image("debian:bookworm", store=ImageStore())
        again = await build_debian("bookworm", store=ImageStore(tmp_path / "images"))
        if known.labels != again.labels:
            pytest.skip("the mirror has newer packages than the image in the store")
        assert again.digest == known.digest

    @pytest.mark.parametrize("release", ["bookworm"])
    async def test_a_debian_image_has_what_tasks_need_and_nothing_of_this_machine(self, release: str) -> None:
        image = await ensure_image(f"debian:{release}", store=ImageStore())
        root = image.layers[0].path
        assert (root / "etc/machine-id").read_bytes() == (root / "etc/resolv.conf").read_bytes() == b""
        assert list((root / "var/log").iterdir()) == []
        assert [path.name for path in (root / "root").iterdir() if path.name not in (".bashrc", ".profile")] == []
        async with sandbox.create(SandboxSpec(image=image)) as box:
            result = await box.exec("git --version && python3 -m venv /v && /v/bin/pip --version && ps -e && id -un")
            assert result.ok, result.error_text

    async def test_pytest_runs_on_the_host_image_from_its_toolkit(self, tmp_path: Path) -> None:
        store = ImageStore(tmp_path / "images")
        layer = await pytest_toolkit(store=store)
        assert await pytest_toolkit(store=store) == layer
        spec = SandboxSpec(image=store.resolve("host"), layers=(layer,), env={"PYTHONPATH": PYTEST_HOME})
        async with sandbox.create(spec) as box:
            await box.write("/app/test_it.py", b"def test_it():\n    assert 6 * 7 == 42\n")
            for command in ("python3 -m pytest -q", f"{PYTEST_HOME}/bin/pytest -q"):
                result = await box.exec(command, cwd="/app")
                assert "1 passed" in result.text, result.error_text
