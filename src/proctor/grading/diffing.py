"""A git patch from two states of files, made without git, so that no setting the candidate left takes part. Pure."""

from __future__ import annotations

import difflib
import zlib
from hashlib import sha1
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proctor.grading.deliverable import Change, FileState

LINK = 0o120000
_TEXT_LIMIT = 1 << 20
_ALPHABET = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def make_patch(changes: Iterable[Change]) -> str:
    """One section per path, sorted. Text as hunks; bytes that are not UTF-8 or large as git's binary literals."""
    return "".join(_section(change) for change in sorted(changes, key=lambda c: c.path))


def _mode(state: FileState) -> str:
    return f"{state.mode if state.mode == LINK else 0o100000 | state.mode:06o}"


def _section(change: Change) -> str:
    before, after = change.before, change.after
    if before == after:
        return ""
    if before is not None and after is not None and (before.mode == LINK) != (after.mode == LINK):
        from proctor.grading.deliverable import Change as Make

        return _section(Make(change.path, before, None)) + _section(Make(change.path, None, after))
    old, new = quote(f"a/{change.path}"), quote(f"b/{change.path}")
    lines = [f"diff --git {old} {new}\n"]
    if before is None and after is not None:
        lines.append(f"new file mode {_mode(after)}\n")
    elif after is None and before is not None:
        lines.append(f"deleted file mode {_mode(before)}\n")
    elif before is not None and after is not None and before.mode != after.mode:
        lines.append(f"old mode {_mode(before)}\nnew mode {_mode(after)}\n")
    left, right = (before.data if before else b""), (after.data if after else b"")
    if left != right:
        lines.append(_body(left, right, old if before else "/dev/null", new if after else "/dev/null"))
    return "".join(lines)


def _body(left: bytes, right: bytes, old: str, new: str) -> str:
    if _is_text(left) and _is_text(right):
        hunks = "".join(_hunks(left.decode(), right.decode()))
        return f"--- {old}\n+++ {new}\n{hunks}"
    return f"index {_blob(left)}..{_blob(right)}\nGIT binary patch\n{_literal(right)}\n{_literal(left)}\n"


def _blob(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _is_text(data: bytes) -> bool:
    if len(data) > _TEXT_LIMIT or b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _lines(text: str) -> list[str]:
    """Lines ended by `\\n` alone, as git sees them (not the many separators of str.splitlines)."""
    parts = text.split("\n")
    last = parts.pop()
    return [part + "\n" for part in parts] + ([last] if last else [])


def _hunks(left: str, right: str) -> Iterable[str]:
    for line in list(difflib.unified_diff(_lines(left), _lines(right), n=3))[2:]:
        yield line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


def quote(name: str) -> str:
    """A path as git writes it: C-quoted when it has control, quote or non-ASCII bytes."""
    raw = name.encode("utf-8", "surrogateescape")
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in raw):
        return name
    named = {0x22: '\\"', 0x5C: "\\\\", 0x0A: "\\n", 0x09: "\\t", 0x0D: "\\r"}
    return '"' + "".join(named.get(b) or (chr(b) if 0x20 <= b < 0x7F else f"\\{b:03o}") for b in raw) + '"'


def _literal(data: bytes) -> str:
    packed = zlib.compress(data, 9)
    out = [f"literal {len(data)}\n"]
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        length = len(piece)
        head = chr(ord("A") + length - 1) if length <= 26 else chr(ord("a") + length - 27)
        out.append(f"{head}{_base85(piece)}\n")
    return "".join(out)


def _base85(piece: bytes) -> str:
    padded = piece + b"\0" * (-len(piece) % 4)
    digits = bytearray()
    for start in range(0, len(padded), 4):
        value = int.from_bytes(padded[start : start + 4], "big")
        group = bytearray(5)
        for place in range(4, -1, -1):
            value, rest = divmod(value, 85)
            group[place] = _ALPHABET[rest]
        digits += group
    return digits.decode()
