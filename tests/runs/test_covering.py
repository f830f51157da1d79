"""Secrets in the archive of a sandbox's disk: none is left, and the archive stays one."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest
import zstandard

from proctor.runs import covering
from proctor.runs.covering import cover_archive

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "sk-proctor-0123456789abcdef"


def packed(path: Path, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(zstandard.compress(buffer.getvalue()))
    return path.read_bytes()


def unpacked(path: Path) -> dict[str, bytes]:
    content = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        found = {}
        for one in tar:
            file = tar.extractfile(one)
            assert file is not None
            found[one.name] = file.read()
        return found


@pytest.mark.parametrize("piece", [1, 7, 26, 27, 28, 1000, 1 << 20])
def test_a_secret_is_found_wherever_a_piece_ends(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering, "_PIECE", piece)
    path = tmp_path / "diff.tar.zst"
    secret = SECRET.encode()
    packed(path, {"a": b"x" * 13 + secret + b"y" + secret * 2, "b": b"nothing", "c": secret[:-1]})
    assert cover_archive(path, ["another-secret", SECRET])
    mask = b"[redacted]" + b"*" * 17
    assert unpacked(path) == {"a": b"x" * 13 + mask + b"y" + mask * 2, "b": b"nothing", "c": secret[:-1]}
    assert [one.name for one in tmp_path.iterdir()] == ["diff.tar.zst"]


def test_an_archive_without_a_secret_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "diff.tar.zst"
    before = packed(path, {"a": b"x" * 100})
    assert cover_archive(path, [SECRET])
    assert path.read_bytes() == before


def test_a_secret_in_a_name_cannot_be_covered(tmp_path: Path) -> None:
    path = tmp_path / "diff.tar.zst"
    packed(path, {"a": b"x", SECRET: b"x"})
    assert not cover_archive(path, [SECRET])
    assert [one.name for one in tmp_path.iterdir()] == ["diff.tar.zst"]
