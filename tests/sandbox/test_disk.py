"""Disk drivers: the choice, the refusal, and images that are sparse, private and of exactly the size asked for."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from proctor.common import InfraError, RefusedError
from proctor.sandbox import disk
from proctor.sandbox.contract import Resources

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("resources", "driver"),
    [
        (Resources(memory_mb=1024, disk_mb=1024), "memory"),
        (Resources(memory_mb=512, disk_mb=1024), "loop"),
        (Resources(memory_mb=512, disk_mb=1024, disk_driver="memory"), "memory"),
        (Resources(memory_mb=1024, disk_mb=64, disk_driver="loop"), "loop"),
    ],
)
def test_auto_uses_memory_when_the_disk_fits_into_it(resources: Resources, driver: str) -> None:
    assert disk.choose(resources) == driver


def test_a_disk_too_small_for_the_driver_is_refused_by_field() -> None:
    with pytest.raises(RefusedError) as refusal:
        disk.choose(Resources(disk_mb=4, disk_driver="loop"))
    assert refusal.value.field == "resources.disk_mb"


def test_an_image_is_sparse_private_and_capped(tmp_path: Path) -> None:
    templates = disk.Templates(tmp_path / "templates")
    templates.make(tmp_path / "a.img", 256, 50_000)
    info = (tmp_path / "a.img").stat()
    assert info.st_size == 256 << 20
    assert info.st_blocks * 512 < 2 << 20
    assert info.st_mode & 0o777 == 0o600
    dump = subprocess.run(
        ["/usr/sbin/dumpe2fs", "-h", tmp_path / "a.img"], capture_output=True, text=True, check=True
    ).stdout
    facts = dict(line.split(":", 1) for line in dump.splitlines() if ":" in line)
    assert 50_000 <= int(facts["Inode count"]) < 60_000
    assert "has_journal" not in facts["Filesystem features"]
    assert int(facts["Reserved block count"]) == 0


def test_a_copy_is_a_file_system_without_faults(tmp_path: Path) -> None:
    templates = disk.Templates(tmp_path / "templates")
    for name in ("a.img", "b.img"):
        templates.make(tmp_path / name, 64, 1000)
        subprocess.run(["/usr/sbin/e2fsck", "-fn", tmp_path / name], capture_output=True, check=True)


def test_many_at_once_share_one_template(tmp_path: Path) -> None:
    templates = disk.Templates(tmp_path / "templates")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: templates.make(tmp_path / f"{index}.img", 32, 500), range(16)))
    assert sorted(path.name for path in (tmp_path / "templates").iterdir()) == ["ext4-32m-500i.img", "lock"]


def test_an_image_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    templates = disk.Templates(tmp_path / "templates")
    with pytest.raises(InfraError, match="disk image"):
        templates.make(tmp_path / "absent" / "a.img", 32, 500)


def test_more_files_than_the_size_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refusal:
        disk.Templates(tmp_path).make(tmp_path / "a.img", 8, 4_000_000)
    assert refusal.value.field == "resources.disk_inodes"
