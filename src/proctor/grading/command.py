"""A task's test command, taken apart so that it can be run through our entry instead of a shell. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_START_UP = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONUSERBASE", "PYTHONBREAKPOINT")
"""Variables that could run or shadow code before the channel is taken; they are set again afterwards."""
REFUSED_ENV = ("BASH_ENV", "ENV", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTEST_PLUGINS")


@dataclass(frozen=True, slots=True)
class Invocation:
    """What to run: `program` names the script or interpreter as the task wrote it.

    `module` is set for `python -m module`. `prelude` is shell text that has to run before, in a process of its own.
    """

    program: str
    module: str | None
    args: tuple[str, ...]
    env: Mapping[str, str]
    prelude: str = ""


def parse_command(command: str) -> Invocation:
    """Take `[A=B …] program args…` apart; what stands before a last `&&`, `;` or newline is the prelude.

    Raises ConfigError for pipes, redirections, substitutions and anything else that needs a shell.
    """
    prelude, last = _split(command)
    try:
        words = shlex.split(last)
    except ValueError as error:
        raise ConfigError(f"the test command cannot be read: {error}", field="command") from error
    env: dict[str, str] = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    if not words:
        raise ConfigError("the test command is empty", field="command", remedy="name the program that runs the tests")
    if _PYTHON.fullmatch(words[0]):
        rest = words[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return Invocation(words[0], rest[1], tuple(rest[2:]), env, prelude)
        if rest and not rest[0].startswith("-"):
            return Invocation(rest[0], None, tuple(rest[1:]), env, prelude)
        raise ConfigError(
            f"interpreter options in {last!r} are not supported",
            field="command",
            remedy="use `python -m module` or a script",
        )
    return Invocation(words[0], None, tuple(words[1:]), env, prelude)


def _split(command: str) -> tuple[str, str]:
    """The prelude and the last simple command; quoting is respected."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    tokens: list[str] = []
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise ConfigError(f"the test command cannot be read: {error}", field="command") from error
    separators = [t for t in tokens if t and set(t) <= set("();<>|&\n")]
    odd = [t for t in separators if t.strip("\n") not in ("", "&&", ";")]
    if odd or "`" in command or "$(" in command:
        raise ConfigError(
            f"the test command needs a shell ({odd[0] if odd else 'substitution'})",
            field="command",
            remedy="write one plain command, with what must come before it joined by `&&`",
        )
    if not separators:
        return "", command
    parts = re.split(r"&&|;|\n", command.strip())
    last = parts[-1]
    return command.strip()[: -len(last)].rstrip().removesuffix("&&").removesuffix(";").strip(), last.strip()


def without_start_up() -> list[str]:
    """Words that start a program without these variables, also when the image sets them. (Python 3.6 takes an empty
    PYTHONHOME for a place, so making them empty would not do.)"""
    return ["/usr/bin/env", *(word for name in (*_START_UP, *REFUSED_ENV) for word in ("-u", name))]


def split_env(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The process environment at start-up, and the Python variables that are only set after the channel is taken.

    Variables that make a shell, the loader or pytest run something are left out of both.
    """
    early = {k: v for k, v in env.items() if k not in _START_UP and k not in REFUSED_ENV and "()" not in k}
    late = {k: env[k] for k in _START_UP if k in env and k != "PYTHONHOME"}
    return early, late
