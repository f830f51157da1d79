"""Pure functions on text: what of an output a model gets to see, and how a file is edited."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proctor.sandbox.contract import Output


class EditError(ValueError):
    """An edit that cannot be made; `kind` is one of `empty`, `unchanged`, `missing`, `ambiguous`."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


def clip(text: str, limit: int) -> str:
    """`text`, or its head and tail (`limit` characters in all) with the dropped count between them."""
    return _joined(text, "", 0, limit)


def clip_output(output: Output, limit: int) -> str:
    """A captured stream as text of at most `limit` characters and a marker; undecodable bytes are replaced.

    Where the host dropped bytes, a code point that was cut in two counts among the dropped ones.
    """
    if not output.dropped:
        return clip((output.head + output.tail).decode("utf-8", "replace"), limit)
    head, tail = _whole_end(output.head), _whole_start(output.tail)
    lost = output.total - len(head) - len(tail)
    return _joined(head.decode("utf-8", "replace"), tail.decode("utf-8", "replace"), lost, limit)


def _joined(head: str, tail: str, lost_bytes: int, limit: int) -> str:
    """Head and tail with what lies between them, and what exceeds `limit`, dropped and counted."""
    total = len(head) + len(tail)
    if not lost_bytes and total <= limit:
        return head + tail
    if lost_bytes and total <= limit:
        return f"{head}\n[… {lost_bytes} bytes dropped …]\n{tail}"
    front = limit // 2
    back = limit - front
    whole = head + tail
    kept_head, kept_tail = whole[:front], whole[len(whole) - back :] if back else ""
    if lost_bytes:
        between = len(whole[front : len(whole) - back].encode("utf-8", "surrogatepass")) + lost_bytes
        return f"{kept_head}\n[… {between} bytes dropped …]\n{kept_tail}"
    return f"{kept_head}\n[… {total - limit} characters dropped …]\n{kept_tail}"


def _whole_end(data: bytes) -> bytes:
    """`data` without an unfinished UTF-8 sequence at its end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if need > back else data
    return data


def _whole_start(data: bytes) -> bytes:
    """`data` without the rest of a UTF-8 sequence at its start."""
    skip = 0
    while skip < min(3, len(data)) and data[skip] & 0xC0 == 0x80:
        skip += 1
    return data[skip:]


def replace_text(content: bytes, old: str, new: str, *, everywhere: bool = False) -> tuple[bytes, int]:
    """Replace `old` by `new` in a file's bytes; returns the new bytes and the count.

    `old` has to occur exactly once (occurrences that overlap count), unless `everywhere`. Works on bytes, so the
    rest of a file that is not UTF-8 stays as it is. Raises EditError.
    """
    if not old:
        raise EditError("empty", "old_text is empty; use write_file to create or overwrite a file")
    if old == new:
        raise EditError("unchanged", "old_text and new_text are the same")
    wanted, wished = old.encode(), new.encode()
    count = _occurrences(content, wanted)
    if count == 0:
        raise EditError("missing", "old_text does not occur in the file" + _why_missing(content, wanted))
    if count > 1 and not everywhere:
        raise EditError("ambiguous", f"old_text occurs {count} times; add lines around it, or set replace_all")
    return content.replace(wanted, wished), content.count(wanted)


def _occurrences(content: bytes, wanted: bytes) -> int:
    count, at = 0, content.find(wanted)
    while at >= 0:
        count += 1
        at = content.find(wanted, at + 1)
    return count


def _why_missing(content: bytes, wanted: bytes) -> str:
    if b"\r\n" in content and wanted.replace(b"\r\n", b"\n") in content.replace(b"\r\n", b"\n"):
        return " as given, but it does with CRLF line ends (\\r\\n)"
    if b" ".join(wanted.split()) in b" ".join(content.split()):
        return " as given, but it does with other white space; read the file and copy the text exactly"
    return ""


def lines_of(text: str, offset: int, limit: int | None) -> tuple[str, int, int]:
    """Lines `offset`, `offset + 1`, … (from 1), at most `limit` of them: the text, how many, and of how many."""
    lines = io.StringIO(text, newline="\n").readlines()
    chosen = lines[offset - 1 : None if limit is None else offset - 1 + limit]
    return "".join(chosen), len(chosen), len(lines)
