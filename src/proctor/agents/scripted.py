"""The harness that replays a list of actions: for demonstrations, for tests of tasks, and to act out a cheat.

Options: `script`, a JSON or TOML file, a folder with one `<task name>.json` or `.toml` per task, or the list
itself; `stop_on_error`. A script is `{"actions": [{"action": "bash", "command": "…"}, …]}` (in JSON the bare list
will do). Actions are those of the tool loop by short or full name: bash, read, write, edit, finish.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from proctor.agents.acting import act
from proctor.agents.contract import AgentResult, HarnessContext, StopReason, ToolCall
from proctor.agents.steps import acted, parse_options, said
from proctor.agents.tools import TOOLS, Toolbox
from proctor.common import ConfigError

_SHORT = {"read": "read_file", "write": "write_file", "edit": "edit_file"}


class Options(BaseModel):
    """What `--agent scripted` takes."""

    model_config = ConfigDict(extra="forbid")
    script: str | list[dict[str, Any]] = []
    """A file, a folder with a file for each task (none for a task: it does nothing), or the actions themselves."""
    stop_on_error: bool = False
    """Give up at the first action that does not work; else go on as a stubborn agent would."""


class Scripted:
    """Replays actions through the same tools that the tool loop has."""

    name = "scripted"
    version = "1"
    needs_model = False
    options_model = Options

    async def run(self, context: HarnessContext) -> AgentResult:
        """One step per action, until `finish` or the end of the list."""
        options = parse_options(Options, self.name, context.options)
        actions = load_script(options.script, context.task.name)
        context.recorder.step(said("user", context.instruction))
        tools = Toolbox(context.room)
        for number, (name, arguments) in enumerate(actions, 1):
            call = ToolCall(f"action-{number}", name, {}, json.dumps(arguments, ensure_ascii=False))
            await act(context, tools, acted(calls=[call]))
            if call.error and options.stop_on_error:
                return AgentResult(StopReason.GAVE_UP, detail=f"action {number} ({name}): {call.error}")
            if tools.finished is not None:
                return AgentResult(StopReason.FINISHED, final_message=tools.finished)
        return AgentResult(StopReason.FINISHED)


def load_script(script: str | list[dict[str, Any]], task_name: str) -> list[tuple[str, dict[str, Any]]]:
    """The actions for a task, as (tool name, arguments). Raises ConfigError with the file and the action's number."""
    if isinstance(script, list):
        return _actions("script", script)
    path = Path(script)
    if path.is_dir():
        # A task may be called `org/name`; a file may not.
        stems = (task_name.replace("/", "__"), task_name.rpartition("/")[2])
        files = [path / f"{stem}{suffix}" for stem in stems for suffix in (".json", ".toml")]
        found = next((file for file in files if file.is_file()), None)
        return [] if found is None else _read(found)
    return _read(path)


def _read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text("utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the script: {error}", field=str(path), remedy="JSON or TOML, UTF-8") from error
    if isinstance(content, dict):
        if unknown := set(content) - {"actions"}:
            raise ConfigError(f"unknown key {min(unknown)!r}", field=str(path), remedy="only `actions`")
        content = content.get("actions", [])
    return _actions(str(path), content)


def _actions(origin: str, content: Any) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(content, list):
        raise ConfigError("`actions` is not a list", field=origin)
    actions = []
    for number, item in enumerate(content, 1):
        name = item.get("action") if isinstance(item, dict) else None
        tool = _SHORT.get(name, name) if isinstance(name, str) else None
        if tool not in TOOLS:
            known = ", ".join(("bash", *_SHORT, "finish"))
            raise ConfigError(
                f"no such action: {name!r}", field=f"{origin}: actions[{number}]", remedy=f"one of {known}"
            )
        actions.append((str(tool), {key: value for key, value in item.items() if key != "action"}))
    return actions
