"""`agent.toml`: a command-line agent as data.

A recipe says which packages the agent is (its toolkit), how it is started, what it needs of the model endpoint, which
files and variables it is given, and how its transcript is read. docs/agents.md has every field; the harness that acts
on a recipe is `proctor.agents.command_line`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from proctor.common import ConfigError, digest_bytes, digest_json

RECIPES = Path(__file__).parent / "assets" / "recipes"
FILE_NAME = "agent.toml"
MAX_FILE_BYTES = 4 << 20
"""The largest file that a recipe may bring."""

Protocol = Literal["chat", "responses", "messages"]
"""What a model endpoint may speak: OpenAI chat completions, OpenAI responses, Anthropic messages."""
TranscriptFormat = Literal["none", "mini-swe-agent", "codex", "claude", "qwen", "opencode"]

PLACEHOLDERS: dict[str, str] = {
    "instruction": "the task's instruction (in command, stdin and files' text; never in the environment)",
    "endpoint": "base URL of the model endpoint as the sandbox sees it, ending in /v1",
    "endpoint_root": "the same without /v1",
    "token": "the trial's key for that endpoint",
    "model": "the model's name",
    "workdir": "the directory that the agent works in",
    "state": "a writable directory for this trial alone, removed afterwards",
    "toolkit": "where the toolkit's packages are",
    "node": "the toolkit's Node.js",
    "python": "the toolkit's Python",
    "steps": "limit: how many steps",
    "total_s": "limit: seconds in all, rounded up",
    "tool_call_s": "limit: seconds for one tool call, rounded up",
    "seed": "the trial's seed",
}
"""Name → meaning. In a recipe they are written `${name}`; `$${` stands for `${` itself."""

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f\"\\]*")


def _known_placeholders(text: str) -> str:
    for match in _REFERENCE.finditer(text):
        name = match.group(1)
        if name is not None and name not in PLACEHOLDERS:
            raise ValueError(f"${{{name}}} is not known; there are {', '.join(PLACEHOLDERS)}")
    return text


def _beside(text: str) -> str:
    path = PurePosixPath(text)
    if not text or path.is_absolute() or ".." in path.parts or "\0" in text:
        raise ValueError(f"{text!r} does not stay in the recipe's directory")
    return text


def _inside(text: str) -> str:
    if not text.startswith(("/", "${state}", "${workdir}")) or ".." in PurePosixPath(text).parts or "\0" in text:
        raise ValueError(f"{text!r} is not an absolute path (it may begin with ${{state}} or ${{workdir}})")
    return _known_placeholders(text)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return text


def _no_instruction(text: str) -> str:
    if "${instruction}" in text:
        raise ValueError("the instruction may be longer than an environment holds; give it in command, stdin or a file")
    return _known_placeholders(text)


Template = Annotated[str, AfterValidator(_known_placeholders)]
InsidePath = Annotated[str, AfterValidator(_inside)]
RelativePath = Annotated[str, AfterValidator(_beside)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ToolkitTable(_Table):
    """What the agent is made of: packages pinned with hashes, in read-only layers above the task's image."""

    kind: Literal["npm", "pip"]
    lock: RelativePath
    """npm: a `package-lock.json` with a `package.json` beside it; pip: requirements with `--hash`."""
    native: list[RelativePath] = []
    """Programs of the packages (below the toolkit) that need a C library: they are given the toolkit's own."""
    executable: list[RelativePath] = []
    """Files of the packages that are programs, and that a script of the package (which is not run) would mark so."""


class FileTable(_Table):
    """One file that is written into the sandbox before the agent starts: from beside the recipe, or its text here."""

    path: InsidePath
    source: RelativePath | None = None
    text: Template | None = None
    template: bool = False
    """Whether the placeholders in `source` are replaced; otherwise it is written as it is."""
    mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "0644"

    @model_validator(mode="after")
    def _one_content(self) -> FileTable:
        if (self.source is None) == (self.text is None):
            raise ValueError("give exactly one of source and text")
        if self.template and self.source is None:
            raise ValueError("template belongs to source; placeholders in text are always replaced")
        return self


class ProbeTable(_Table):
    """A command that shows that the agent's programs run in this image, and which version they are."""

    command: Annotated[list[Template], Field(min_length=1)]
    expect: Pattern
    """Found somewhere in what the command prints."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 60.0


class TranscriptTable(_Table):
    """Where the agent's own account of its steps is, and in which format."""

    format: TranscriptFormat
    path: Literal["stdout"] | InsidePath = "stdout"
    """A file or a pattern for its name (the newest that matches), or the command's standard output."""


class LogTable(_Table):
    """Files of the agent that are kept in the trial's record, below `agent/`."""

    path: InsidePath
    """A file, or a directory of which every file is kept."""
    name: RelativePath


class MemoryTable(_Table):
    """Where the agent keeps what it remembers from one session to the next. Empty for each trial."""

    path: InsidePath


class AgentRecipe(_Table):
    """The file. See docs/agents.md."""

    version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    agent_version: Annotated[str, Field(min_length=1, max_length=64)]
    summary: str = ""
    protocols: list[Protocol] = []
    """What the agent speaks with its model, any one of them; none: it needs no model."""
    command: Annotated[list[Template], Field(min_length=1)]
    stdin: Template | None = None
    environment: dict[str, Annotated[str, AfterValidator(_no_instruction)]] = {}
    toolkit: ToolkitTable | None = None
    files: list[FileTable] = []
    probe: ProbeTable | None = None
    transcript: TranscriptTable = TranscriptTable(format="none")
    logs: list[LogTable] = []
    memory: MemoryTable | None = None
    memory_mb: Annotated[int, Field(ge=0, le=65536)] = 0
    """Memory that the program itself needs, on top of what the task allows for the work."""

    @model_validator(mode="after")
    def _fits_together(self) -> AgentRecipe:
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"environment: {name!r} is not the name of a variable")
        if self.toolkit is None and (used := self._uses("toolkit", "node", "python")):
            raise ValueError(f"${{{used}}} is used, but there is no [toolkit]")
        if not self.protocols and (used := self._uses("endpoint", "endpoint_root", "token", "model")):
            raise ValueError(f"${{{used}}} is used, but protocols is empty")
        return self

    def _uses(self, *names: str) -> str | None:
        texts = [*self.command, self.stdin or "", *self.environment.values(), *(item.text or "" for item in self.files)]
        texts += self.probe.command if self.probe else []
        return next((name for name in names if any(f"${{{name}}}" in text for text in texts)), None)


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe with the files that it names, read once: what is in here is what is injected, and what is digested."""

    recipe: AgentRecipe
    folder: Path
    contents: dict[str, bytes]
    """By the name in the recipe; `agent.toml` is the recipe itself."""

    @property
    def digests(self) -> dict[str, str]:
        """Digest of the recipe and of each file that it brings, by name."""
        return {name: digest_bytes(data) for name, data in sorted(self.contents.items())}

    @property
    def digest(self) -> str:
        """One digest for all of it."""
        return digest_json(self.digests)


def recipe_names() -> list[str]:
    """The recipes that come with Proctor."""
    return sorted(path.parent.name for path in RECIPES.glob(f"*/{FILE_NAME}"))


def find_recipe(ref: str) -> Path | None:
    """The file that a harness reference stands for: a path that ends in `.toml`, or the name of a packaged recipe."""
    if ref.endswith(".toml"):
        return Path(ref)
    packaged = RECIPES / ref / FILE_NAME
    return packaged if re.fullmatch(r"[a-z0-9][a-z0-9._-]*", ref) and packaged.is_file() else None


def load_recipe(path: Path) -> LoadedRecipe:
    """Read a recipe and everything that it names. Raises ConfigError naming the file and the first wrong field."""
    data = _read(path, str(path))
    recipe = parse_recipe(data, origin=str(path))
    contents = {FILE_NAME: data}
    for number, item in enumerate(recipe.files):
        if item.source is not None:
            field = f"{path}: files.{number}.source"
            content = contents[item.source] = _read(path.parent / item.source, field)
            if item.template:
                _check_template(content, field)
    if recipe.toolkit is not None:
        names = [recipe.toolkit.lock]
        if recipe.toolkit.kind == "npm":
            names.append(str(PurePosixPath(recipe.toolkit.lock).with_name("package.json")))
        for name in names:
            contents[name] = _read(path.parent / name, f"{path}: toolkit.lock")
    return LoadedRecipe(recipe, path.parent, contents)


def parse_recipe(data: bytes, *, origin: str) -> AgentRecipe:
    """The recipe in these bytes. Raises ConfigError."""
    try:
        return AgentRecipe.model_validate(tomllib.loads(data.decode("utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        remedy = f"it takes {', '.join(AgentRecipe.model_fields)}" if first["type"] == "extra_forbidden" else None
        raise ConfigError(message, field=f"{origin}: {place}" if place else origin, remedy=remedy) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"not TOML: {error}", field=origin) from error


def _read(path: Path, field: str) -> bytes:
    try:
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path.name} is larger than {MAX_FILE_BYTES} bytes", field=field)
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}", field=field) from error


def _check_template(data: bytes, field: str) -> None:
    try:
        _known_placeholders(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError("a template has to be UTF-8", field=field) from error
    except ValueError as error:
        raise ConfigError(str(error), field=field) from error


def fill(text: str, values: dict[str, Any]) -> str:
    """`text` with its placeholders replaced, each once: what a value holds is never looked at again."""

    def replacement(match: re.Match[str]) -> str:
        name = match.group(1)
        return "${" if name is None else str(values[name])

    return _REFERENCE.sub(replacement, text)


def check_values(values: dict[str, Any]) -> None:
    """Refuse values that would break out of a quoted string in a configuration file (the instruction never goes into
    one that is not text). Raises ConfigError."""
    for name, value in values.items():
        if name != "instruction" and not _PLAIN.fullmatch(str(value)):
            raise ConfigError(f"{value!r} has a quote, a backslash or a control character", field=f"${{{name}}}",
                              remedy="choose one without; it goes into configuration files")  # fmt: skip


FORMATS: tuple[str, ...] = get_args(TranscriptFormat)
