"""Which paths cross, decided from names and kinds alone; and layers read as the kernel would show them."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.grading.collect import leaves
from proctor.grading.protect import Protection
from proctor.grading.sanitise import Policy, make_plan, reason_to_drop
from proctor.grading.trees import View
from proctor.sandbox.contract import DiffEntry, Layer
from proctor.tasks.model import Carry, Environment, Solution, Task, TestSpec, Verifier

if TYPE_CHECKING:
    from pathlib import Path

POLICY = Policy("/app", ("/usr/bin", "/app/bin"), mounts=("/proc", "/dev", "/sys"))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/app/out.txt", None),
        ("/app/.hidden", None),
        ("/data/x", None),
        ("/tmp/x", None),
        ("/home/user/work", None),
        ("/var/lib/app/db", None),
        ("/logs/artifacts/x", None),
        ("/logs/verifier/reward.txt", "verifier"),
        ("/logs/verifier", "verifier"),
        ("/tests/test.sh", "verifier"),
        ("/solution", "verifier"),
        ("/usr/bin/curl", "system"),
        ("/etc/ld.so.preload", "system"),
        ("/lib/x.so", "system"),
        ("/opt/tool", "system"),
        ("/app/bin/python3", "shadow"),
        ("/root/.local/bin/uvx", "startup"),
        ("/root/.bashrc", "startup"),
        ("/home/user/.profile", "startup"),
        ("/home/user/.config/pip/pip.conf", "startup"),
        ("/app/sitecustomize.py", "startup"),
        ("/app/lib/evil.pth", "startup"),
        ("/.dotted", "startup"),
        ("/app/pkg/__pycache__/x.cpython-311.pyc", "bytecode"),
        ("/app/x.pyc", "bytecode"),
        ("/conftest.py", "test-config"),
        ("/pytest.ini", "test-config"),
        ("/app/conftest.py", None),
    ],
)
def test_reason(path: str, reason: str | None) -> None:
    assert reason_to_drop(DiffEntry(path, "added", "file"), POLICY) == reason


@pytest.mark.parametrize("kind", ["fifo", "socket", "char", "block"])
def test_special_files_never_cross(kind: str) -> None:
    assert reason_to_drop(DiffEntry("/app/x", "added", kind), POLICY) == "special"  # type: ignore[arg-type]


@pytest.mark.parametrize("workdir", ["/usr/src/app", "/opt/app"])
def test_a_workdir_inside_a_system_directory_is_the_work(workdir: str) -> None:
    policy = replace(POLICY, workdir=workdir)
    assert reason_to_drop(DiffEntry(f"{workdir}/out.txt", "added", "file"), policy) is None
    assert reason_to_drop(DiffEntry("/usr/src/other", "added", "file"), policy) == "system"
    assert reason_to_drop(DiffEntry("/usr/bin/tool", "added", "file"), replace(policy, workdir="/usr")) == "system"


def test_system_carry_still_refuses_the_verifiers_places() -> None:
    system = replace(POLICY, system=True)
    assert reason_to_drop(DiffEntry("/usr/bin/tool", "added", "file"), system) is None
    assert reason_to_drop(DiffEntry("/etc/nginx.conf", "added", "file"), system) is None
    assert reason_to_drop(DiffEntry("/etc/ld.so.preload", "added", "file"), system) == "system"
    assert reason_to_drop(DiffEntry("/logs/verifier/reward.txt", "added", "file"), system) == "verifier"


@given(st.lists(st.sampled_from(["..", ".", "a", "", "b"]), max_size=8), st.integers(1, 4))
def test_a_link_leaves_exactly_when_its_path_does(parts: list[str], depth: int) -> None:
    place = ["d"] * (depth - 1) + ["link"]
    target = "/".join(parts)
    level, outside = depth - 1, target.startswith("/")
    for part in parts:
        level += -1 if part == ".." else 0 if part in (".", "") else 1
        outside = outside or level < 0
    assert leaves(place, target) == outside


def layers(tmp_path: Path) -> tuple[Layer, Layer]:
    base, upper = tmp_path / "base", tmp_path / "upper"
    for root in (base, upper):
        root.mkdir()
    (base / "etc").mkdir()
    (base / "etc" / "passwd").write_text("root")
    (base / "etc" / "ssl").mkdir()
    (base / "etc" / "ssl" / "cert").write_text("cert")
    (base / "usr" / "lib" / "site-packages").mkdir(parents=True)
    (base / "app").mkdir()
    (base / "app" / "old").write_text("old")
    (upper / "app").mkdir()
    (upper / "app" / "tool").write_text("x")
    (upper / "app" / "tool").chmod(0o4755)
    (upper / "app" / "link").symlink_to("/etc/passwd")
    return Layer(base), Layer(upper)


def test_view_merges_layers_and_follows_no_link(tmp_path: Path) -> None:
    base, upper = layers(tmp_path)
    with View([base, upper]) as view:
        assert view.names("/app") == ["link", "old", "tool"]
        state = view.state("/app/link")
        assert state is not None
        assert (state.mode, state.data) == (0o120000, b"/etc/passwd")
        assert view.state("/app/link/x") is None
        assert view.state("/app/../etc/passwd") is None
        assert view.stat("/nowhere") is None
        assert [path for path, _ in view.walk("/app")] == ["/app", "/app/link", "/app/old", "/app/tool"]


@pytest.mark.skipif(os.geteuid() != 0, reason="making a whiteout needs root")
def test_view_honours_whiteouts_and_opaque_directories(tmp_path: Path) -> None:
    base, upper = layers(tmp_path)
    os.mknod(upper.path / "app" / "old", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    (upper.path / "etc").mkdir()
    os.setxattr(upper.path / "etc", "trusted.overlay.opaque", b"y")
    with View([base, upper]) as view:
        assert view.names("/app") == ["link", "tool"]
        assert view.stat("/app/old") is None
        assert view.names("/etc") == []
        assert view.stat("/etc/passwd") is None


def test_plan_restores_what_was_deleted_and_plains_set_id_files(tmp_path: Path) -> None:
    base, upper = layers(tmp_path)
    entries = [
        DiffEntry("/app/tool", "added", "file", mode=0o4755),
        DiffEntry("/etc/passwd", "modified", "file"),
        DiffEntry("/etc/ssl", "deleted", "dir"),
        DiffEntry("/usr", "modified", "dir"),
        DiffEntry("/usr/new", "added", "dir"),
        DiffEntry("/usr/new/below", "added", "file"),
        DiffEntry("/proc", "added", "dir"),
    ]
    with View([base]) as below, View([base, upper]) as frozen:
        plan = make_plan(entries, below, frozen, POLICY)
    assert plan.remove == ["/etc/passwd", "/usr/new"]
    assert set(plan.restore) == {"/etc/passwd", "/etc/ssl/cert"}
    assert plan.directories == ["/etc/ssl"]
    assert plan.plain == {"/app/tool": 0o755}


PATCH = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"


def protection(tmp_path: Path, *, runner: str = "pytest", reference: str = "src/a.py") -> Protection:
    (tmp_path / "tests.patch").write_text(PATCH.format("tests/unit/test_a.py"))
    (tmp_path / "gold.patch").write_text(PATCH.format(reference))
    (tmp_path / "files" / "more").mkdir(parents=True, exist_ok=True)
    (tmp_path / "files" / "more" / "test_b.py").write_text("")
    spec = TestSpec(
        runner=runner,  # type: ignore[arg-type]
        command="pytest",
        fail_to_pass=(),
        pass_to_pass=(),
        cwd="/repo/sub",
        patch=tmp_path / "tests.patch",
        files=tmp_path / "files",
        protected=("data",),
    )
    task = Task(
        "t", tmp_path, "", "", Environment(workdir="/repo"), Verifier("tests", tests=spec),
        Carry("patch", repo="/repo"), Solution(patch=tmp_path / "gold.patch"),
    )  # fmt: skip
    return Protection(task, spec, "/")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("src/a.py", None),
        ("tests/unit/test_other.py", None),
        ("tests/unit/test_a.py", "tests"),
        ("data", "tests"),
        ("data/x.json", "tests"),
        ("sub/more/test_b.py", "tests"),
        ("tests", "above"),
        ("tests/unit", "above"),
        ("sub/more", "above"),
        ("conftest.py", "runner"),
        ("deep/conftest.py", "runner"),
        ("setup.cfg", "runner"),
        ("x.dist-info/entry_points.txt", "runner"),
        ("pkg/__pycache__/a.pyc", "runner"),
        ("sitecustomize.py", "runner"),
        (".git/config", "runner"),
        ("tests/runtests.py", None),
    ],
)
def test_protection(tmp_path: Path, path: str, why: str | None) -> None:
    assert protection(tmp_path).why(path) == why


def test_what_the_reference_changes_may_be_changed(tmp_path: Path) -> None:
    assert protection(tmp_path, reference="setup.cfg").why("setup.cfg") is None


def test_a_projects_own_runner_is_protected(tmp_path: Path) -> None:
    assert protection(tmp_path, runner="django").why("tests/runtests.py") == "runner"
    assert protection(tmp_path, runner="sympy").why("sympy/utilities/runtests.py") == "runner"
