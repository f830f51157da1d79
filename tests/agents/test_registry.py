"""Finding harnesses: the table, import paths, and classes that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proctor.agents import HARNESSES, load_harness
from proctor.common import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
class Agent:
    name, version, needs_model = "mine", "2", False

    async def run(self, context):
        return None
"""


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_every_name_in_the_table_loads(name: str) -> None:
    assert load_harness(name).name == name


def test_a_class_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_good_agent.py").write_text(GOOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_harness("my_good_agent:Agent").version == "2"


@pytest.mark.parametrize(
    ("source", "path", "words"),
    [
        (GOOD, "nonesuch", "no harness 'nonesuch'.*one of oracle, null"),
        (GOOD, "no_such_module_here:Agent", "cannot import no_such_module_here"),
        (GOOD, "{module}:Other", "has no Other"),
        ("Agent = 3", "{module}:Agent", "is not a class"),
        (GOOD.replace("needs_model", "needs_a_model"), "{module}:Agent", "no attribute `needs_model: bool`"),
        (GOOD.replace('"2"', "2"), "{module}:Agent", "no attribute `version: str`"),
        (GOOD.replace("async def", "def"), "{module}:Agent", "no `async def run"),
        (GOOD.replace("context", "*, context"), "{module}:Agent", "does not take one argument"),
        (GOOD + "    def __init__(self, x): pass", "{module}:Agent", "without arguments"),
        ("import no_such_thing_either", "{module}:Agent", "cannot import"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, path: str, words: str, request: pytest.FixtureRequest
) -> None:
    module = f"agent_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        load_harness(path.format(module=module))
