"""The spool keeps exactly what a capture in memory would, is readable from any offset, and survives its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.sandbox._spool import Spool
from proctor.sandbox.contract import OutputLimit

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def numbered(count: int, start: int = 0) -> bytes:
    """Bytes of which each run of a few tells where it is."""
    return b"".join(b"%07d." % (at // 8) for at in range(start - start % 8, start + count + 8, 8))[start % 8 :][:count]


@settings(max_examples=25)
@given(
    chunks=st.lists(st.integers(1, 9000), max_size=12),
    head=st.sampled_from([0, 1, 100, 5000]),
    tail=st.sampled_from([0, 1, 4096, 20_000]),
    restarts=st.sets(st.integers(0, 11), max_size=3),
)
def test_head_tail_and_count_are_exact_whatever_comes_and_whoever_dies(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[int], head: int, tail: int, restarts: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    limit = OutputLimit(head, tail)
    spool, written = Spool(folder, "1.stdout", limit), b""
    for number, size in enumerate(chunks):
        if number in restarts:
            spool.close()
            before = spool.total
            spool = Spool(folder, "1.stdout", limit)
            if tail:
                assert spool.total == before
            spool.skip_to(len(written))
        data = numbered(size, len(written))
        spool.add(data)
        written += data
    output = spool.output()
    assert spool.total == len(written) == output.total
    assert output.head == written[:head]
    rest = written[len(output.head) :]
    assert output.tail == (rest[-tail:] if tail else b"")
    kept = sum(path.stat().st_size for path in folder.iterdir())
    assert kept <= head + tail + max(tail // 4, 4096)


@settings(max_examples=15)
@given(since=st.integers(0, 60_000), most=st.integers(1, 70_000))
def test_any_offset_can_be_read_and_what_was_dropped_is_passed_over_by_name(
    tmp_path_factory: pytest.TempPathFactory, since: int, most: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool, data = Spool(folder, "7.stderr", OutputLimit(1000, 16_384)), numbered(50_000)
    for at in range(0, len(data), 777):
        spool.add(data[at : at + 777])
    piece = spool.read(since, most)
    assert piece.offset >= since
    assert piece.data == data[piece.offset : piece.offset + len(piece.data)]
    assert (piece.data == b"") == (since >= len(data))
    if since < 1000 or since >= len(data) - 16_384:
        assert piece.offset == since, "what is kept is not passed over"


def test_what_a_full_disk_has_no_room_for_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    spool = Spool(tmp_path, "1.stdout", OutputLimit(100, 100))
    spool.add(b"a" * 50)
    write = os.write
    full = True

    def short(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", short)
    spool.add(b"b" * 30)
    full = False
    spool.add(b"c" * 20)
    output = spool.output()
    assert (output.head, output.dropped, output.tail) == (b"a" * 50, 30, b"c" * 20)
    assert spool.read(50).offset == 80


def test_it_can_be_removed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "1.stdout", OutputLimit(10, 10))
    spool.add(b"x" * 100)
    spool.remove()
    assert list(tmp_path.iterdir()) == []
