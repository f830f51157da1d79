"""Where each key of a TOML file stands: tomllib gives values but no positions, and an error needs a line.

The scanner walks text that tomllib has already accepted, so it only has to find keys, not to judge them.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from typing import Any

KeyPath = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_BASIC_BLOCK = re.compile(r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})', re.DOTALL)
_LITERAL_BLOCK = re.compile(r"'''.*?'''(?:'{0,2})", re.DOTALL)
_POSITION = re.compile(r"\(at (?:line (\d+), column \d+|end of document)\)$")


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.starts = [0] + [found.end() for found in re.finditer("\n", text)]
        self.lines: dict[KeyPath, int] = {}
        self.sizes: dict[KeyPath, int] = {}

    def here(self) -> int:
        return bisect_right(self.starts, self.at)

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"unexpected text in line {self.here()}")
        self.at = found.end()
        return found.group()

    def key(self) -> list[str]:
        """A dotted key; leaves the position after it."""
        parts: list[str] = []
        while True:
            self.skip(_BLANK)
            if self.peek('"'):
                parts.append(str(tomllib.loads("k=" + self.skip(_BASIC))["k"]))
            elif self.peek("'"):
                parts.append(self.skip(_LITERAL)[1:-1])
            else:
                parts.append(self.skip(_BARE_KEY))
            self.skip(_BLANK)
            if not self.peek("."):
                return parts
            self.at += 1

    def note(self, path: KeyPath, line: int) -> None:
        self.lines.setdefault(path, line)

    def locate(self, parts: list[str], prefix: KeyPath, line: int) -> KeyPath:
        """The full path of a dotted key: the current element of each array of tables on the way is meant."""
        path = prefix
        for part in parts:
            path = (*path, part)
            self.note(path, line)
            if path in self.sizes:
                path = (*path, self.sizes[path] - 1)
        return path

    def header(self) -> KeyPath:
        line = self.here()
        is_array = self.peek("[[")
        self.at += 2 if is_array else 1
        parts = self.key()
        self.at += 2 if is_array else 1
        if not is_array:
            return self.locate(parts, (), line)
        path = (*self.locate(parts[:-1], (), line), parts[-1])
        self.note(path, line)
        self.sizes[path] = self.sizes.get(path, 0) + 1
        element = (*path, self.sizes[path] - 1)
        self.note(element, line)
        return element

    def pair(self, prefix: KeyPath) -> None:
        line = self.here()
        path = self.locate(self.key(), prefix, line)
        self.at += 1  # the equals sign
        self.skip(_BLANK)
        self.value(path)

    def value(self, path: KeyPath) -> None:
        if self.peek('"""'):
            self.skip(_BASIC_BLOCK)
        elif self.peek("'''"):
            self.skip(_LITERAL_BLOCK)
        elif self.peek('"'):
            self.skip(_BASIC)
        elif self.peek("'"):
            self.skip(_LITERAL)
        elif self.peek("["):
            self.sequence(path)
        elif self.peek("{"):
            self.inline_table(path)
        else:
            self.skip(_SCALAR)

    def sequence(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        while True:
            self.skip(_BLANK)
            if self.peek("]"):
                self.at += 1
                return
            if self.peek(","):
                self.at += 1
                continue
            element = (*path, index)
            self.note(element, self.here())
            self.value(element)
            index += 1

    def inline_table(self, path: KeyPath) -> None:
        self.at += 1
        while True:
            self.skip(_BLANK)
            if self.peek("}"):
                self.at += 1
                return
            if self.peek(","):
                self.at += 1
                continue
            self.pair(path)

    def run(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while True:
            self.skip(_BLANK)
            if self.at >= len(self.text):
                return self.lines
            if self.peek("["):
                table = self.header()
            else:
                self.pair(table)


def key_lines(text: str) -> dict[KeyPath, int]:
    """The 1-based line of every key, table and array element of a valid TOML document.

    Keys are paths as in the parsed value: `("steps", 0, "agent", "timeout_sec")`.
    """
    return _Scanner(text).run()


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """The line of `path`, or of the nearest thing that contains it; None for the document itself."""
    for length in range(len(path), 0, -1):
        if line := lines.get(tuple(path[:length])):
            return line
    return None


def parse_toml(data: bytes) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Parse TOML bytes; returns the value and the line of every key.

    Raises TomlSyntaxError, with a line where there is one, for bytes that are not UTF-8 or not TOML.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TomlSyntaxError("not UTF-8 text", data[: error.start].count(b"\n") + 1) from error
    text = text.replace("\r\n", "\n")
    try:
        value = tomllib.loads(text)
        lines = key_lines(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = _POSITION.search(message)
        line = int(found.group(1)) if found and found.group(1) else text.count("\n") + 1
        raise TomlSyntaxError(_POSITION.sub("", message).strip(), line) from error
    except RecursionError as error:
        raise TomlSyntaxError("nested too deeply", 1) from error
    return value, lines


class TomlSyntaxError(ValueError):
    """The file is not TOML; `line` is where the parser stopped."""

    def __init__(self, message: str, line: int) -> None:
        self.line = line
        super().__init__(message)
