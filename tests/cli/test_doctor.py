"""`proctor doctor`: facts read from files, tiers from facts, an exit code from the default tier."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from proctor.cli import doctor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("release", "good"), [("6.1.0-18-amd64", True), ("5.19", True), ("5.15.0-91-generic", False), ("odd", False)]
)
def test_kernel(release: str, good: bool) -> None:
    assert doctor.check_kernel(release).ok is good


V1 = """cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,freezer 0 0
"""
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"
HYBRID = V1 + "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sys/fs/cgroup/unified").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "sys/fs/cgroup/unified/cgroup.controllers").write_text("\n")
    return tmp_path


@pytest.mark.parametrize(
    ("mounts", "detail"), [(V1, "v1: cpu"), (HYBRID, "v1 (hybrid)"), (V2, "v2 at /sys/fs/cgroup with")]
)
def test_cgroup_layouts(root: Path, mounts: str, detail: str) -> None:
    check = doctor.check_cgroups(mounts, root)
    assert check.ok
    assert check.detail.startswith(detail)


def test_missing_controllers_are_named(root: Path) -> None:
    check = doctor.check_cgroups(V1.replace("pids", "perf_event"), root)
    assert not check.ok
    assert "pids" in check.detail


def test_namespaces_switched_off(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    for kind in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup"):
        (tmp_path / "self/ns" / kind).touch()
    (tmp_path / "sys/user").mkdir(parents=True)
    (tmp_path / "sys/user/max_user_namespaces").write_text("0\n")
    check = doctor.check_namespaces(tmp_path)
    assert (check.status, check.remedy) == ("missing", "sysctl user.max_user_namespaces=10000")
    (tmp_path / "self/ns/user").unlink()
    assert "no user namespaces" in doctor.check_namespaces(tmp_path).detail


def test_a_file_is_not_kvm(tmp_path: Path) -> None:
    (tmp_path / "kvm").touch()
    assert not doctor.check_kvm(tmp_path / "kvm").ok
    assert not doctor.check_kvm(tmp_path / "absent").ok


def test_a_program_that_is_missing_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.check_program("buildah", "buildah")
    assert check.remedy == "apt-get install --no-install-recommends buildah"
    assert not doctor.check_program("runsc", None).ok


def test_a_program_that_fails_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'cannot connect to the daemon' >&2; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    check = doctor.check_program("docker", "docker.io")
    assert not check.ok
    assert "cannot connect" in check.detail


def test_a_tier_lacks_exactly_what_its_checks_lack() -> None:
    checks = {name: doctor.Check(name, "ok", "") for name in ("root", "buildah")}
    assert doctor._tier("image/dockerfile", checks).status == "ok"
    checks["buildah"] = doctor.Check("buildah", "missing", "", "install it")
    tier = doctor._tier("image/dockerfile", checks)
    assert (tier.status, tier.missing, tier.remedies) == ("missing", ("buildah",), ("install it",))


def test_json_has_every_tier_and_the_exit_code_says_whether_native_works() -> None:
    result = CliRunner().invoke(doctor.doctor, ["--json", "--no-probe"])
    found = json.loads(result.stdout)
    assert found["version"] == 1
    tiers = {tier["name"]: tier["status"] for tier in found["tiers"]}
    assert set(tiers) == set(doctor._TIERS)
    assert result.exit_code == (0 if tiers["container/native"] == "ok" else 1)


@pytest.mark.sandbox
def test_the_probe_makes_a_real_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path))
    monkeypatch.delenv("PROCTOR_IMAGES", raising=False)
    check = doctor.check_sandbox()
    assert check.ok, check.detail


def test_text_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(doctor.doctor, ["--no-probe"])
    assert "container/runsc" in result.stdout
    assert "lacks runsc" in result.stdout
