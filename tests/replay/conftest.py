"""Trials to be replayed: toy tasks on the host image, acted out by a script or by a scripted model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tests.runs.toys import make_toy

from proctor.runs.request import Request
from proctor.runs.session import Session

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Exam:
    """Runs one toy task with scripted actions and says where the record is."""

    folder: Path
    count: int = 0

    def run(self, actions: list[dict[str, Any]], *, attempts: int = 1, more: str = "") -> Path:
        self.count += 1
        tasks = self.folder / f"tasks-{self.count}"
        make_toy(tasks, "toy", more=more)
        script = self.folder / f"script-{self.count}.json"
        script.write_text(json.dumps({"actions": actions}))
        out = self.folder / f"run-{self.count}"
        request = Request(sources=(str(tasks),), agents=("scripted",), options=(f"script={script}",), attempts=attempts)
        assert Session.new(request, out).run(concurrency=1, as_json=True) == 0
        return out


@pytest.fixture
def exam(tmp_path: Path) -> Exam:
    return Exam(tmp_path)


def bash(command: str) -> dict[str, Any]:
    return {"action": "bash", "command": command}
