"""`.harborignore`: files of `tests/` and `solution/` that are never copied into a sandbox (gitignore syntax)."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.common import digest_tree, state_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORE_FILE = ".harborignore"


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern: later rules win, `negated` ones bring files back."""

    pattern: re.Pattern[str]
    negated: bool
    directories_only: bool


def parse_rules(text: str) -> list[Rule]:
    """Rules of a file in gitignore syntax (gitignore(5))."""
    rules = []
    for raw in text.splitlines():
        line = raw if raw.endswith("\\ ") else raw.rstrip()
        if not line or line.startswith("#"):
            continue
        negated = line.startswith("!")
        line = line[1:] if negated else line
        line = line[1:] if line.startswith(("\\#", "\\!")) else line
        directories_only = line.endswith("/")
        line = line.rstrip("/")
        if line:
            rules.append(Rule(re.compile(_regex(line), re.DOTALL), negated, directories_only))
    return rules


def _regex(pattern: str) -> str:
    """A pattern with a slash before its end is anchored to the folder; any other matches at every depth."""
    anchored = "/" in pattern
    pattern = pattern.lstrip("/")
    out = "" if anchored else "(?:.*/)?"
    at = 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            out, at = out + ".*", at + 2
        elif pattern[at] == "*":
            out, at = out + "[^/]*", at + 1
        elif pattern[at] == "?":
            out, at = out + "[^/]", at + 1
        elif pattern[at] == "[" and (end := pattern.find("]", at + 2)) > 0:
            body = pattern[at + 1 : end].replace("\\", "\\\\")
            out += "[" + ("^" + body[1:] if body.startswith("!") else body) + "]"
            at = end + 1
        elif pattern[at] == "\\" and at + 1 < len(pattern):
            out, at = out + re.escape(pattern[at + 1]), at + 2
        else:
            out, at = out + re.escape(pattern[at]), at + 1
    return out


def is_ignored(rules: Sequence[Rule], relative: str, *, is_directory: bool) -> bool:
    """Whether the last matching rule excludes `relative` (slash-separated, relative to the ignore file)."""
    ignored = False
    for rule in rules:
        if (is_directory or not rule.directories_only) and rule.pattern.fullmatch(relative):
            ignored = not rule.negated
    return ignored


def visible_directory(folder: Path) -> Path:
    """`folder` as it may be copied into a sandbox: itself, or a filtered copy when it has an ignore file.

    The copy is kept under the state directory by the folder's digest. Nothing below an ignored directory
    comes back, as in git.
    """
    ignore_file = folder / IGNORE_FILE
    if not ignore_file.is_file():
        return folder
    target = state_dir() / "filtered" / digest_tree(folder).removeprefix("sha256:")
    if target.is_dir():
        return target
    rules = parse_rules(ignore_file.read_text(encoding="utf-8", errors="surrogateescape"))

    def hidden(current: str, names: list[str]) -> list[str]:
        base = os.path.relpath(current, folder)
        found = []
        for name in names:
            relative = name if base == "." else f"{base}/{name}"
            is_directory = os.path.isdir(os.path.join(current, name))
            if (base == "." and name == IGNORE_FILE) or is_ignored(rules, relative, is_directory=is_directory):
                found.append(name)
        return found

    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=".draft-"))
    try:
        shutil.copytree(folder, draft, ignore=hidden, symlinks=True, dirs_exist_ok=True)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster: its copy is the same
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
