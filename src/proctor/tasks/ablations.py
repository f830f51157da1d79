"""Interventions: what a task, or a file beside it, can give to the agent or take from it to learn what it lacked.

An ablation is data with a digest: a text to be told, an executable to be there, limits to be longer, or pieces of the
instruction to be left out. What it changes is measured by running the task with and without it.
"""

from __future__ import annotations

import fnmatch
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proctor.common import ConfigError, digest_json
from proctor.tasks.schema import AblationName, AblationTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from proctor.tasks.findings import Findings
    from proctor.tasks.model import AgentLimits

AblationKind = Literal["knowledge", "plan", "tool", "budget", "remove"]
TITLES: Mapping[str, str] = {"knowledge": "What you need to know", "plan": "A plan", "tool": "A tool for this task"}
"""Under which heading the agent is told the text of an ablation, after the instruction."""
BUDGET = ("total_s", "steps", "tokens", "cost_usd")
"""The limits that a longer budget makes longer; `tool_call_s` bounds one call, not the trial."""
MAX_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class Ablation:
    """One intervention. `text` is told, `remove` is cut out of the instruction, `limits` and `factor` set the budget,
    `program` is written to `path` in the sandbox, executable, before the agent starts."""

    name: str
    kind: AblationKind
    text: str = ""
    remove: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    factor: float | None = None
    path: str | None = None
    program: bytes | None = field(default=None, repr=False)

    @property
    def digest(self) -> str:
        """Digest of everything it consists of but its name."""
        program = self.program.hex() if self.program is not None else None
        return digest_json({"kind": self.kind, "text": self.text, "remove": list(self.remove), "path": self.path,
                            "limits": dict(self.limits), "factor": self.factor, "program": program})  # fmt: skip

    def instruct(self, instruction: str) -> str:
        """The instruction as the agent gets it. Raises ConfigError when a piece to remove is not in it."""
        for piece in self.remove:
            if piece not in instruction:
                raise ConfigError(f"{piece[:60]!r} is not in the instruction", field=f"ablation {self.name}: remove",
                                  remedy="quote it word for word, line breaks included")  # fmt: skip
            instruction = instruction.replace(piece, "")
        if not instruction.strip():
            raise ConfigError("nothing of the instruction would be left", field=f"ablation {self.name}: remove")
        if not self.text:
            return instruction
        return f"{instruction.rstrip()}\n\n## {TITLES[self.kind]}\n\n{self.text.strip()}\n"

    def budget(self, limits: AgentLimits) -> dict[str, float]:
        """What changes in the limits: those it names, or all of BUDGET that are set, times its factor."""
        if self.factor is None:
            return dict(self.limits)
        known = {name: getattr(limits, name) for name in BUDGET}
        return {
            name: max(1, round(value * self.factor)) if isinstance(value, int) else value * self.factor
            for name, value in known.items()
            if value is not None
        }


def longer_budget(factor: float) -> Ablation:
    """The one ablation that needs nothing from the task: every limit of the trial times `factor`."""
    return Ablation(f"budget-x{factor:g}", "budget", factor=factor)


def make_ablation(name: str, table: AblationTable, read: Callable[[str], bytes]) -> Ablation:
    """An ablation from its checked table; `read` returns the bytes of a file that it names."""
    text, program = table.text or "", None
    if table.file is not None:
        content = read(table.file)
        if len(content) > MAX_TEXT:
            raise ConfigError("is larger than 1 MiB", field=table.file)
        if table.kind == "tool":
            program = content
        else:
            text = _text(content, table.file)
    if table.kind == "tool" and not text:
        text = f"There is a program for this task: `{table.path}`. Run it without arguments to see what it does."
    return Ablation(name, table.kind, text, tuple(table.remove), table.limits.model_dump(exclude_none=True),
                    table.factor, table.path, program)  # fmt: skip


def declared_ablations(
    tables: Mapping[str, AblationTable], root: Path, instruction: str, findings: Findings
) -> tuple[Ablation, ...]:
    """What a task's `[proctor.ablations]` declares. Each must fit its instruction, and its file lie outside of what the
    agent sees anyway."""
    found = []
    for name, table in tables.items():
        try:
            if table.file is not None and table.file.split("/")[0] == "environment":
                raise ConfigError("is in environment/, where every trial has it", field=table.file)
            ablation = make_ablation(name, table, lambda file: (root / file).read_bytes())
            ablation.instruct(instruction)
            found.append(ablation)
        except OSError as error:
            findings.error(("proctor", "ablations", name, "file"), f"cannot be read: {error.strerror}")
        except ConfigError as error:
            findings.error(("proctor", "ablations", name), error.line())
    return tuple(found)


def _text(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("is not UTF-8 text", field=name) from error
    if not text.strip():
        raise ConfigError("is empty", field=name, remedy="write what the agent is to be told")
    return text


class AblationEntry(AblationTable):
    """One `[[ablation]]` of a file: its name, and shell patterns of the tasks that it is for (all, by default)."""

    name: AblationName
    tasks: list[str] = Field(default_factory=lambda: ["*"], min_length=1)


class AblationFile(BaseModel):
    """A file of ablations for tasks that are not to be edited."""

    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    ablation: Annotated[list[AblationEntry], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class GivenAblation:
    """An ablation from a file, with the patterns of the tasks that it is for."""

    ablation: Ablation
    tasks: tuple[str, ...]

    def is_for(self, task_name: str) -> bool:
        """Whether the task's name, or the part after its last slash, fits one of the patterns."""
        short = task_name.rpartition("/")[2]
        return any(fnmatch.fnmatchcase(name, one) for one in self.tasks for name in (task_name, short))


def read_ablations(path: Path) -> list[GivenAblation]:
    """The ablations of a file; paths in it are taken from where it is. Raises ConfigError naming file and field."""
    try:
        parsed = AblationFile.model_validate(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(first["msg"].removeprefix("Value error, "), field=f"{path}: {place}",
                          remedy="see docs/conditions.md") from error  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"not TOML: {error}", field=str(path)) from error

    def read(name: str) -> bytes:
        try:
            return (path.parent / name).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", field=str(path.parent / name)) from error

    return [GivenAblation(make_ablation(one.name, one, read), tuple(one.tasks)) for one in parsed.ablation]
