"""One table of built-in harnesses, and any other by its import path."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from proctor.agents.recipe import find_recipe, load_recipe, recipe_names
from proctor.common import ConfigError

if TYPE_CHECKING:
    from proctor.agents.contract import Harness

HARNESSES: dict[str, str] = {
    "oracle": "proctor.agents.oracle:Oracle",
    "null": "proctor.agents.null:Null",
    "scripted": "proctor.agents.scripted:Scripted",
    "tool-loop": "proctor.agents.tool_loop:ToolLoop",
    "text-loop": "proctor.agents.text_loop:TextLoop",
}
"""Name on the command line → `module.path:ClassName`."""


def load_harness(name: str) -> Harness:
    """The harness of that name, the command-line agent of a recipe (by its name, or the path of its `.toml`), or the
    class at `module.path:ClassName`, made without arguments.

    Raises ConfigError when there is none, or when the recipe or class is not as it should be.
    """
    if name not in HARNESSES and (recipe := find_recipe(name)) is not None:
        from proctor.agents.command_line import CommandLineAgent

        return CommandLineAgent(load_recipe(recipe))
    path = HARNESSES.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        known = ", ".join((*HARNESSES, *recipe_names()))
        raise _problem(f"there is no harness {name!r}", f"one of {known}, an agent.toml, or module.path:ClassName")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise _problem(f"cannot import {module_name}: {error}", "check PYTHONPATH and the name") from error
    for part in class_name.split("."):
        if (found := getattr(found, part, None)) is None:
            raise _problem(f"{module_name} has no {class_name}", "give module.path:ClassName")
    factory: Any = found
    if not inspect.isclass(factory):
        raise _problem(f"{path} is not a class", "give module.path:ClassName")
    try:
        instance: Any = factory()
    except TypeError as error:
        raise _problem(f"{path} cannot be made without arguments: {error}", "read settings from options") from error
    _check(path, instance)
    harness: Harness = instance
    return harness


def _check(path: str, harness: Any) -> None:
    """The Protocol, attribute by attribute, so that the message names what is missing."""
    for attribute, kind in (("name", str), ("version", str), ("needs_model", bool)):
        if not isinstance(getattr(harness, attribute, None), kind):
            raise _problem(f"{path} has no attribute `{attribute}: {kind.__name__}`", "see docs/agents.md")
    run = getattr(harness, "run", None)
    if not inspect.iscoroutinefunction(run):
        raise _problem(f"{path} has no `async def run(self, context)`", "see docs/agents.md")
    try:
        inspect.signature(run).bind(object())
    except TypeError as error:
        raise _problem(f"{path}.run does not take one argument, the context", "see docs/agents.md") from error


def _problem(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, field="agent.harness", remedy=remedy)
