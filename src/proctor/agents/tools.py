"""The tools of the built-in harnesses: the check of what a model sent, and what they do.

Whatever goes wrong with a call becomes a structured error that the model can act on. Only the machinery's own
faults (a lost sandbox) and the limits of the trial are raised.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proctor.agents.simulated_user import OutOfQuestions
from proctor.agents.text import EditError, clip, clip_output, lines_of, replace_text
from proctor.models.reply import strict_json, well_formed
from proctor.sandbox.contract import EndReason, ExecResult, FileError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.agents.contract import Room, ToolCall
    from proctor.agents.simulated_user import UserDesk

_REASONS = {
    EndReason.OOM: "killed: out of memory",
    EndReason.PIDS: "refused: too many processes",
    EndReason.DISK: "the disk is full",
    EndReason.KILLED: "killed from outside",
}


class Bash(BaseModel):
    """Run a command with bash in the working directory and return its exit code and output.

    Each call is a new shell: `cd` and variables do not carry over. Background jobs keep running.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    command: str = Field(min_length=1, description="The command, or several lines of shell script.")
    timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds after which the command and all its children are killed."
    )


class ReadFile(BaseModel):
    """Return the content of a text file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    path: str = Field(min_length=1, description="Absolute, or relative to the working directory.")
    offset: int = Field(default=1, ge=1, description="First line to return, counted from 1.")
    limit: int | None = Field(default=None, ge=1, description="How many lines to return at most.")


class WriteFile(BaseModel):
    """Create a file or overwrite it; missing parent directories are made."""

    model_config = ConfigDict(extra="forbid", strict=True)
    path: str = Field(min_length=1, description="Absolute, or relative to the working directory.")
    content: str = Field(description="The whole new content.")


class EditFile(BaseModel):
    """Replace a piece of text in a file. It has to occur exactly once, unless replace_all is set."""

    model_config = ConfigDict(extra="forbid", strict=True)
    path: str = Field(min_length=1, description="Absolute, or relative to the working directory.")
    old_text: str = Field(min_length=1, description="The exact text to replace, white space included.")
    new_text: str = Field(description="What to put in its place; empty to delete.")
    replace_all: bool = Field(default=False, description="Replace every occurrence.")


class AskUser(BaseModel):
    """Ask the person who gave you the task one question, and wait for the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    question: str = Field(min_length=1, max_length=4000)


class Finish(BaseModel):
    """End the task. Call it when the work is done and checked, or when it cannot be done."""

    model_config = ConfigDict(extra="forbid", strict=True)
    message: str = Field(default="", description="What was done, in a sentence or two.")


TOOLS: Mapping[str, type[BaseModel]] = {
    "bash": Bash,
    "read_file": ReadFile,
    "write_file": WriteFile,
    "edit_file": EditFile,
    "ask_user": AskUser,
    "finish": Finish,
}
"""Every tool by its name; what a model is told about them is in the toolset (`proctor.agents.toolset`)."""

MALFORMED = frozenset({"invalid_json", "unknown_tool", "invalid_arguments"})
"""Kinds of errors that mean that a call could not even be tried."""


def is_malformed(call: ToolCall) -> bool:
    """Whether a call could not even be tried: no such tool, or arguments that are not what it takes."""
    return (call.error or "").partition(":")[0] in MALFORMED


class ToolError(Exception):
    """A tool call that did not work, as the model is told: `kind`, a message, and more where it helps."""

    def __init__(self, kind: str, message: str, **more: Any) -> None:
        self.kind = kind
        self.body = {"error": {"kind": kind, "message": message, **{k: v for k, v in more.items() if v is not None}}}
        super().__init__(message)


@dataclass(slots=True)
class Toolbox:
    """Runs tool calls in a room. `output_chars` bounds what a model sees of one result; without a `user` there is no
    tool to ask one."""

    room: Room
    output_chars: int = 16_000
    user: UserDesk | None = None
    finished: str | None = field(default=None, init=False)
    """The message of `finish`, once it was called."""

    async def run(self, call: ToolCall) -> str:
        """Run one call: fills in its parsed arguments, result, error and duration, and returns the result."""
        start = time.monotonic()
        try:
            if self.finished is not None:
                raise ToolError("already_finished", "not run: finish was called before it")
            model = self._tool(call.name)
            arguments = _arguments(call.raw_arguments)
            call.arguments = well_formed(arguments)
            call.result = await self._act(_validated(call.name, model, arguments), call)
        except ToolError as error:
            call.result = json.dumps(error.body, ensure_ascii=False)
            call.error = f"{error.kind}: {error}"
        finally:
            call.duration_s = time.monotonic() - start
        return call.result

    def _tool(self, name: str) -> type[BaseModel]:
        known = {tool: model for tool, model in TOOLS.items() if model is not AskUser or self.user is not None}
        if (model := known.get(name)) is None:
            raise ToolError("unknown_tool", f"there is no tool {name!r}", tools=list(known))
        return model

    async def _act(self, request: BaseModel, call: ToolCall) -> str:
        try:
            match request:
                case Bash():
                    return self._shown(await self.room.bash(request.command, timeout_s=request.timeout_s))
                case ReadFile():
                    return await self._read(request)
                case WriteFile():
                    data = request.content.encode()
                    await self.room.write(request.path, data)
                    return f"wrote {len(data)} bytes to {request.path}"
                case EditFile():
                    return await self._edit(request)
                case AskUser() if self.user is not None:
                    return await self.user.answer(request.question, call)
                case Finish():
                    self.finished = request.message
                    return "finished"
        except OutOfQuestions as error:
            raise ToolError("no_more_questions", str(error)) from None
        except TimeoutError:
            raise ToolError("timeout", "the file operation took longer than its limit") from None
        except FileError as error:
            raise ToolError("file", error.message, path=error.path) from error
        except SandboxError as error:
            raise ToolError("sandbox", error.line()) from error
        raise AssertionError(f"no action for {type(request).__name__}")

    def _shown(self, result: ExecResult) -> str:
        """A command's result as text; a time-out and the like are errors that carry the output so far."""
        text = describe(result, self.output_chars)
        if result.timed_out:
            raise ToolError("timeout", f"killed after {result.duration_s:.1f} s with all its children", output=text)
        if result.reason is not None:
            raise ToolError(result.reason.lower(), _REASONS.get(result.reason, str(result.reason)), output=text)
        return text

    async def _read(self, request: ReadFile) -> str:
        data = await self.room.read(request.path)
        if b"\0" in data:
            message = f"a binary file of {len(data)} bytes; look at it with a command"
            raise ToolError("binary", message, path=request.path)
        text, count, total = lines_of(data.decode("utf-8", "replace"), request.offset, request.limit)
        if not count and total:
            raise ToolError("range", f"offset {request.offset} is past the end: the file has {total} lines")
        shown = clip(text, self.output_chars) if total else "[the file is empty]"
        if count < total:
            shown += f"\n[lines {request.offset}-{request.offset + count - 1} of {total}]"
        return shown

    async def _edit(self, request: EditFile) -> str:
        content = await self.room.read(request.path)
        try:
            edited, count = replace_text(content, request.old_text, request.new_text, everywhere=request.replace_all)
        except EditError as error:
            raise ToolError(f"edit_{error.kind}", str(error), path=request.path) from error
        await self.room.write(request.path, edited)
        return f"replaced {count} occurrence{'s' if count > 1 else ''} in {request.path}"


def describe(result: ExecResult, limit: int) -> str:
    """A command's end and its output, at most `limit` characters of it, shared by the two streams."""
    head = f"exit code: {result.exit_code}" if result.signal is None else f"killed by signal {result.signal}"
    if result.timed_out:
        head = f"timed out after {result.duration_s:.1f} s"
    lines = [head]
    errors = clip_output(result.stderr, limit // 2 if result.stdout.total else limit)
    output = clip_output(result.stdout, limit - len(errors) if errors else limit)
    if output:
        lines += ["stdout:", output.removesuffix("\n")]
    if errors:
        lines += ["stderr:", errors.removesuffix("\n")]
    return "\n".join(lines)


def _arguments(raw: str) -> dict[str, Any]:
    try:
        value = strict_json(raw) if raw.strip() else {}
    except ValueError as error:
        raise ToolError("invalid_json", f"the arguments are not JSON: {error}", received=clip(raw, 400)) from error
    if not isinstance(value, dict):
        raise ToolError("invalid_json", f"the arguments must be an object, not {type(value).__name__}")
    return value


def _validated(name: str, model: type[BaseModel], arguments: Mapping[str, Any]) -> BaseModel:
    """The typed request. A null for an optional field counts as absent: many models send it so."""
    required = schema(model).get("required", [])
    given = {key: value for key, value in arguments.items() if value is not None or key in required}
    for key, value in given.items():
        if isinstance(value, str):
            _encoded(key, value, binary=key in ("content", "old_text", "new_text"))
    try:
        return model.model_validate(given)
    except ValidationError as error:
        problems = [
            {"field": ".".join(map(str, item["loc"])), "problem": item["msg"]}
            for item in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        message = "; ".join(f"{item['field']}: {item['problem']}" for item in problems)
        raise ToolError("invalid_arguments", f"{name}: {message}", fields=problems, required=required) from error


def _encoded(name: str, text: str, *, binary: bool) -> bytes:
    """`text` as UTF-8, or the reason why no file and no command could hold it."""
    if not binary and "\0" in text:
        raise ToolError("invalid_arguments", f"{name}: a NUL character at {text.index(chr(0))} is not allowed")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolError("invalid_arguments", f"{name}: a lone surrogate at {error.start} is not text") from error


def schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema without titles and the class text; an optional field is one that may be absent, not null."""
    made = model.model_json_schema()
    made.pop("title", None)
    made.pop("description", None)
    for prop in made["properties"].values():
        prop.pop("title", None)
        if "anyOf" in prop:
            concrete = [option for option in prop.pop("anyOf") if option.get("type") != "null"]
            prop.update(concrete[0])
            prop.pop("default", None)
    return made
