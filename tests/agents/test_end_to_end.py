"""From the command line to a graded record: a scripted model behind real HTTP solves a task of the demo."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.agents.programs import proctor, upstream

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

WRONG = "    return ordered[len(ordered) // 2]\n"
RIGHT = "    half = len(ordered) // 2\n    return (ordered[half] + ordered[~half]) / 2\n"

TOOL_TURNS: list[Any] = [
    [{"status": 503, "body": "busy"}, {"tool_calls": [{"name": "read_file", "arguments": {"path": "stats.py"}}]}],
    {"tool_calls": [{"name": "edit_file", "arguments": {"path": "stats.py", "old_text": WRONG, "new_text": RIGHT}}]},
    {"tool_calls": [{"name": "bash", "arguments": "python3 -m unittest"}]},
    {"tool_calls": [{"name": "bash", "arguments": {"command": "python3 -m unittest"}}]},
    {"text": "All green.", "tool_calls": [{"name": "finish", "arguments": {"message": "fixed"}}]},
]
PATCH = f"import pathlib; p = pathlib.Path('stats.py'); p.write_text(p.read_text().replace({WRONG!r}, {RIGHT!r}))"
TEXT_TURNS: list[Any] = [
    {"text": f"Fix it.\n```bash\npython3 - <<'PY'\n{PATCH}\nPY\npython3 -m unittest\n```"},
    {"text": "It works.\nTASK_FINISHED"},
]


@pytest.mark.parametrize(("harness", "turns"), [("tool-loop", TOOL_TURNS), ("text-loop", TEXT_TURNS)])
def test_a_scripted_model_solves_a_task(harness: str, turns: list[Any], tmp_path: Path) -> None:
    record = tmp_path / "record"
    with upstream(turns, tmp_path) as url:
        done = proctor(
            "run", "examples/demo", "--task", "*fix-median", "--agent", harness, "--model", f"small@{url}",
            "-o", str(record), home=tmp_path / "home",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (trial,) = (record / "trials").iterdir()
    result = json.loads((trial / "result.json").read_text())
    assert result["outcome"] == "resolved", result
    trajectory = json.loads((trial / "trajectory.json").read_text())
    assert trajectory["agent"]["name"] == harness
    agent_steps = [step for step in trajectory["steps"] if step["source"] == "agent"]
    assert len(agent_steps) == len(turns)
    assert agent_steps[0]["model_name"] == "small-scripted"
    if harness == "tool-loop":
        assert agent_steps[0]["extra"]["attempts"] == 2
        assert "invalid_json" in agent_steps[2]["observation"]["results"][0]["content"]


def test_an_endpoint_that_is_down_is_never_a_zero(tmp_path: Path) -> None:
    record = tmp_path / "record"
    path = tmp_path / "model.toml"
    path.write_text('name = "small"\nbase_url = "http://127.0.0.1:9/v1"\nmax_retries = 0\n')
    done = proctor(
        "run", "examples/demo", "--task", "*fix-median", "--agent", "tool-loop", "--model", str(path),
        "-o", str(record), home=tmp_path / "home",
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    (trial,) = (record / "trials").iterdir()
    result = json.loads((trial / "result.json").read_text())
    assert result["outcome"] == "infra_error"
    assert "cannot reach" in json.dumps(result)
