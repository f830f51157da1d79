"""What a shell command does, as far as its text tells: programs, whether it reads, writes or checks, hosts it names.

A guess by reading, never by running: whatever rests on it is a heuristic and is called so.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass
from typing import Literal

Kind = Literal["read", "run", "write", "verify"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READS = _words(
    "[ awk basename cat cd cmp column cut date df diff dir dirname du echo egrep env export fgrep file find free grep "
    "head hexdump hostname id jq less ls md5sum more nl od printenv printf ps pwd readlink realpath rg seq set sha1sum "
    "sha256sum sleep sort source stat strings tac tail test tr tree true type uname uniq wc which whoami xxd zcat"
)
_WRITES = _words("chmod chown cp dd install ln mkdir mktemp mv patch rm rmdir rsync shred tee touch truncate unzip")
_CHECKS = _words("ctest flake8 jest mypy nosetests phpunit pytest py.test pyright rspec ruff tox vitest")
_GIT_READS = _words("blame branch cat-file describe diff grep log ls-files ls-tree rev-parse shortlog show status")
_TESTING = {
    "make": _words("test check tests"),
    "npm": _words("test t"),
    "yarn": _words("test"),
    "pnpm": _words("test"),
    "go": _words("test vet"),
    "cargo": _words("test clippy check"),
    "mvn": _words("test verify"),
    "gradle": _words("test check"),
    "dotnet": _words("test"),
    "bundle": _words("rspec"),
}
_INSTALLERS = _words("apt apt-get apk conda dnf gem npm pip pip3 pnpm uv yarn yum")
_WRAPPERS = _words("command env exec nice nohup stdbuf sudo time timeout xargs")
_KEYWORDS = _words("! { } if then elif else fi while until do done case esac")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_URL = re.compile(r"\b(?:https?|ftp|ssh|git|wss?)://(?:[^\s/@'\"]*@)?(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+)")
_SCP = re.compile(r"\b[\w.-]+@([A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+):")
_SEPARATORS = ";|&()\n"
_ORDER: tuple[Kind, ...] = ("read", "run", "write", "verify")


@dataclass(frozen=True, slots=True)
class Shell:
    """A command's text, read. `kind` is the weightiest thing it does: verify, then write, run, read."""

    kind: Kind
    programs: tuple[str, ...]
    """Each program once, with the subcommand where that says what it is for (`git diff`), in order."""
    hosts: tuple[str, ...]
    writes: tuple[str, ...]
    """Paths that output is redirected to."""
    checked: bool
    """Something ran, or was checked, after the last thing that it wrote."""


def read_shell(text: str) -> Shell:
    """Read a command. Text that is no shell still gives something: its first word as the program."""
    kinds: list[Kind] = []
    programs: dict[str, None] = {}
    writes: list[str] = []
    checked = False
    for words in _simple_commands(_without_heredocs(text)):
        targets = _targets(words)
        writes += targets
        words = _unwrapped(_without_redirections(words))
        kind: Kind = "write" if targets else "read"
        if words and words[0].strip("/ \t"):
            name = _name(words[0])
            programs[_program(name, words)] = None
            kind = max(kind, _kind(name, words), key=_ORDER.index)
        kinds.append(kind)
        checked = kind in ("run", "verify") or (checked and kind == "read")
    heaviest: Kind = max(kinds, key=_ORDER.index, default="read")
    return Shell(heaviest, tuple(programs), hosts_in(text), tuple(writes), checked)


def hosts_in(text: str) -> tuple[str, ...]:
    """Hosts that a text names in URLs and scp-like addresses, each once, in lower case."""
    found = [match.group(1).lower().strip("[].") for match in (*_URL.finditer(text), *_SCP.finditer(text))]
    return tuple(dict.fromkeys(host for host in found if host))


def _without_heredocs(text: str) -> str:
    """The text without the bodies of here-documents: they are data."""
    lines, kept, until = text.replace("\\\n", " ").split("\n"), [], None
    for line in lines:
        if until is not None:
            until = None if line.strip() == until else until
            continue
        kept.append(line)
        if found := _HEREDOC.search(line):
            until = found.group(2)
    return "\n".join(kept)


def _simple_commands(text: str) -> list[list[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS + "<>")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word and set(word) <= set(_SEPARATORS):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:  # quotes that do not close: what came before them still counts
        pass
    return [words for words in commands if words and not words[0].startswith("#")]


def _targets(words: list[str]) -> list[str]:
    """Files that output goes to; not the null device, not another descriptor."""
    found = []
    for index, word in enumerate(words[:-1]):
        target = words[index + 1]
        if word.startswith(">") and set(word) <= {">", "&"} and target != "/dev/null" and not target.isdigit():
            found.append(target)
    return found


def _without_redirections(words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word and set(word) <= set("<>&"):
            skip = True
        else:
            kept.append(word)
    return kept


def _unwrapped(words: list[str]) -> list[str]:
    """The command without keywords, assignments, `sudo`, `timeout 5` and the like before it."""
    while words and words[0] in _KEYWORDS:
        words = words[1:]
    if words and words[0] in ("for", "select", "function"):
        return []
    while words and (_ASSIGNMENT.match(words[0]) or posixpath.basename(words[0]) in _WRAPPERS):
        wrapper = posixpath.basename(words[0])
        words = words[1:]
        if wrapper in _WRAPPERS:
            while words and (words[0].startswith("-") or re.fullmatch(r"[\d.]+[smhd]?", words[0])):
                words = words[1:]
    return words


def _name(word: str) -> str:
    """The program's name without its folder; every Python is `python`."""
    name = posixpath.basename(word.rstrip("/"))
    return "python" if re.fullmatch(r"(python|pypy)[\d.]*", name) else name


def _program(name: str, words: list[str]) -> str:
    if name == "python":
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else None
        return f"python -m {module}" if module else "python"
    if name in _TESTING or name in _INSTALLERS or name in ("git", "docker", "kubectl"):
        verb = next((word for word in words[1:] if not word.startswith("-")), None)
        return f"{name} {verb}" if verb and re.fullmatch(r"[a-z][a-z-]*", verb) else name
    return name


def _kind(name: str, words: list[str]) -> Kind:
    rest = set(words[1:])
    if name in _CHECKS or rest & _TESTING.get(name, frozenset()):
        return "verify"
    if name == "python" and "-m" in words and rest & (_CHECKS | {"unittest", "doctest", "py_compile"}):
        return "verify"
    if name == "git":
        verb = next((word for word in words[1:] if not word.startswith("-")), "")
        return "read" if verb in _GIT_READS else "write"
    if name == "sed":
        return "write" if any(word.startswith(("-i", "--in-place")) for word in words[1:]) else "read"
    if name == "find":
        return "write" if rest & {"-delete", "-exec", "-execdir"} else "read"
    if name in _WRITES or (name in _INSTALLERS and rest & {"install", "add", "remove", "uninstall", "upgrade"}):
        return "write"
    return "read" if name in _READS else "run"
