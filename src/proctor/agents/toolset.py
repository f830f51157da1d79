"""What the tool loop says to a model: system prompt, nudge and tool definitions, as data with a version.

A version is a folder of `assets/tool-loop/`. Once it is released its files do not change: results that were made with
it stay comparable, and its digest is in each trajectory.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proctor.common import ConfigError, digest_tree

FOLDER = Path(__file__).parent / "assets" / "tool-loop"
NEWEST = "1"
ASK_USER = "ask_user"


@dataclass(frozen=True, slots=True)
class Toolset:
    """One version. `definitions` is an OpenAI-style `tools` array with `${tool_call_s}` still in it."""

    version: str
    digest: str
    system_prompt: str
    system_prompt_with_user: str
    nudge: str
    definitions: tuple[dict[str, Any], ...]

    def tools(self, tool_call_s: float, *, with_user: bool = False) -> list[dict[str, Any]]:
        """The `tools` array for a trial; `tool_call_s` is the limit that a model is told about."""
        chosen = [tool for tool in self.definitions if with_user or tool["function"]["name"] != ASK_USER]
        made = copy.deepcopy(chosen)
        for tool in made:
            for prop in tool["function"]["parameters"]["properties"].values():
                prop["description"] = prop["description"].replace("${tool_call_s}", f"{tool_call_s:g}")
        return made


@functools.cache
def load_toolset(version: str = NEWEST) -> Toolset:
    """The files of a version. Raises ConfigError when there is none."""
    folder = FOLDER / version
    if version not in toolset_versions():
        raise ConfigError(f"there is no version {version!r}", field="agent.options.toolset",
                          remedy=f"one of {', '.join(toolset_versions())}")  # fmt: skip

    def text(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8").strip()

    definitions = json.loads((folder / "tools.json").read_bytes())
    return Toolset(
        version, digest_tree(folder), text("system.md"), text("system-with-user.md"), text("nudge.md"),
        tuple(definitions),
    )  # fmt: skip


def toolset_versions() -> list[str]:
    """The versions that there are, oldest first."""
    return sorted((path.name for path in FOLDER.iterdir() if (path / "tools.json").is_file()), key=int)
