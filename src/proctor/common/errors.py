"""One error hierarchy for every room, and the exit codes the command line gives for it.

A message is one line: what happened, to what, and what to do next.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `proctor` command (documented in docs/cli.md)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INCONCLUSIVE = 3
    BAD_INPUT = 4
    REFUSED = 5
    INFRA = 6
    INTERRUPTED = 130


class ProctorError(Exception):
    """Base of all errors that Proctor raises on purpose.

    `field` names the input that was wrong (`task.toml: environment.memory_mb`), `remedy` what to do.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, field: str | None = None, remedy: str | None = None) -> None:
        self.message = message
        self.field = field
        self.remedy = remedy
        super().__init__(self.line())

    def line(self) -> str:
        """The error as one line: `field: message (remedy)`."""
        head = f"{self.field}: {self.message}" if self.field else self.message
        text = f"{head} ({self.remedy})" if self.remedy else head
        return " ".join(text.split())


class ConfigError(ProctorError):
    """Input that a person wrote is wrong: a task file, a spec, a dataset, an argument."""

    exit_code = ExitCode.BAD_INPUT


class RefusedError(ProctorError):
    """The request is understood but cannot be honoured here, so it is refused rather than weakened."""

    exit_code = ExitCode.REFUSED


class InfraError(ProctorError):
    """The machinery failed (not the candidate, not the task): worth a retry, never a zero."""

    exit_code = ExitCode.INFRA
