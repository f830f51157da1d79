"""Reading unified diffs as far as tasks need: which files a patch touches."""

from __future__ import annotations

import re

_HEADER = re.compile(r"^(?:---|\+\+\+) (.*)$")
_GIT = re.compile(r"^diff --git (.*)$")
_MOVE = re.compile(r"^(?:rename|copy) (?:from|to) (.*)$")
_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def patch_paths(text: str) -> tuple[str, ...]:
    """Repository paths that a diff touches (old and new names), in order, each once, as `git apply -p1` reads it.

    Lines inside hunks are skipped by their counts, so that a line of content such as `--- a/x` is not taken
    for a header. For patches of people: what a hostile patch does is told by looking at the tree afterwards, since
    programs that apply patches are more lenient than any reader.
    """
    paths: dict[str, None] = {}
    old = new = 0
    for line in text.split("\n"):
        if old > 0 or new > 0:
            old -= line[:1] in ("-", " ", "")
            new -= line[:1] in ("+", " ", "")
            continue
        if found := _HUNK.match(line):
            old = int(found.group(1) or "1")
            new = int(found.group(2) or "1")
        elif found := _GIT.match(line):
            for name in _git_names(found.group(1)):
                paths.setdefault(name)
        elif found := _MOVE.match(line):
            paths.setdefault(_unquote(found.group(1)))
        elif found := _HEADER.match(line):
            name = _unquote(found.group(1).split("\t")[0].rstrip("\r"))
            if name != "/dev/null":
                paths.setdefault(_without_prefix(name))
    return tuple(paths)


def _git_names(text: str) -> list[str]:
    """The name of a `diff --git a/x b/x` line, when both sides are the same (else other lines tell)."""
    half = (len(text) - 1) // 2
    left, right = _without_prefix(_unquote(text[:half])), _without_prefix(_unquote(text[half + 1 :]))
    return [left] if left == right and text[half : half + 1] == " " else []


def _without_prefix(name: str) -> str:
    """A name without its first component (`a/`, `b/`, whatever it is), as -p1 means."""
    return name.split("/", 1)[1] if "/" in name else name


def _unquote(name: str) -> str:
    """Undo git's C-style quoting of odd names."""
    if len(name) < 2 or name[0] != '"' or name[-1] != '"':
        return name
    body = re.sub(r"\\([0-7]{3})", lambda found: f"\\x{int(found.group(1), 8):02x}", name[1:-1])
    try:
        return body.encode("latin-1").decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeError:
        return name[1:-1]
