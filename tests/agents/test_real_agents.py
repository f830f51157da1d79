"""The real command-line agents, and real repository tasks, against a scripted upstream that plays recorded answers.

Heavy: the first run fetches the agents' packages (about 1.5 GB in all) and builds the tasks' images.
`scripts/test -m heavy tests/agents/test_real_agents.py`
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.agents import programs
from tests.agents.programs import upstream

from proctor.agents import load_harness
from proctor.agents.recipe import recipe_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = [pytest.mark.heavy, pytest.mark.sandbox]

proctor = partial(programs.proctor, timeout_s=1800)
COMMAND = "echo proctor-was-here | tee proof.txt; sha256sum proof.txt"
PROOF = "proctor-was-here"
SHELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "mini-swe-agent": ("bash", {"command": COMMAND}),
    "codex": ("exec_command", {"cmd": COMMAND}),
    "claude-code": ("Bash", {"command": COMMAND, "description": "leave a proof"}),
    "qwen-code": ("run_shell_command", {"command": COMMAND, "description": "leave a proof", "is_background": False}),
    "opencode": ("bash", {"command": COMMAND, "description": "leave a proof"}),
}
"""The tool of each agent that runs a command, and how it is asked."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def called(name: str, arguments: Mapping[str, Any], text: str = "") -> dict[str, Any]:
    return {"text": text, "tool_calls": [{"name": name, "arguments": dict(arguments)}]}


def read(trial: Path, name: str) -> Any:
    return json.loads((trial / name).read_text())


def test_there_is_a_script_for_every_recipe() -> None:
    assert sorted(SHELLS) == recipe_names()


@pytest.mark.parametrize("name", list(SHELLS))
def test_an_agent_calls_its_model_runs_a_command_and_ends(name: str, tmp_path: Path) -> None:
    last = called("bash", {"command": SUBMIT}) if name == "mini-swe-agent" else {"text": "It is there."}
    record = tmp_path / "record"
    with upstream([called(*SHELLS[name], text="First a proof."), last], tmp_path) as url:
        done = proctor(
            "run", "examples/demo", "--task", "fix-median", "--agent", name, "--model", f"small@{url}",
            "-o", str(record), home=tmp_path / "home",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (trial,) = (record / "trials").iterdir()
    result = read(trial, "result.json")
    assert (result["outcome"], result["stop"]) == ("unresolved", "finished"), result
    # The command ran in the sandbox: the host sees the file that it left; of the agent's own nothing is left.
    changed = {entry["path"]: entry["size"] for entry in read(trial, "diff.json")["entries"]}
    assert changed["/app/proof.txt"] == len(PROOF) + 1
    assert not [path for path in changed if path.startswith(("/opt/proctor", "/var/lib/proctor-agent"))]
    # What the agent tells: the call, and the output that only a shell in there can have made.
    steps = [step for step in read(trial, "trajectory.json")["steps"] if step["source"] == "agent"]
    (first, *_) = steps
    assert all(step["extra"]["told_by"] == "agent" for step in steps)
    assert COMMAND in json.dumps(first["tool_calls"][0]["arguments"])
    assert "  proof.txt" in json.dumps(first["observation"]["results"][0]["content"])
    if name != "mini-swe-agent":
        assert result["final_message"] == "It is there."
    # What was used is what the upstream counted: 10 and 5 tokens a call.
    calls = result["usage"]["model_calls"]
    assert calls == 2
    assert (result["usage"]["prompt_tokens"], result["usage"]["completion_tokens"]) == (10 * calls, 5 * calls)
    lock = read(record, "run.json")["agents"][0]["harness"]
    assert lock["version"] == load_harness(name).version
    assert len(lock["layers"]) >= 2
    assert "toolkit" in lock["injected"]
    # The token of the trial is worthless by now, and in no file of the record all the same.
    for path in trial.rglob("*"):
        if path.is_file() and path.suffix != ".zst":
            assert b"sk-proctor-" not in path.read_bytes(), path


@pytest.mark.parametrize("name", list(SHELLS))
def test_an_agent_runs_in_other_images(name: str, tmp_path: Path) -> None:
    for image in ("debian:bookworm", "debian:bullseye"):
        done = proctor("doctor", "--tools", "--image", image, "--agent", name, "--json", home=tmp_path / "home")
        assert done.returncode == 0, done.stdout
        assert json.loads(done.stdout)["checks"][-1]["tool"] == name


@pytest.mark.anyio
@pytest.mark.parametrize("name", list(SHELLS))
async def test_an_agent_runs_in_an_image_that_has_nothing(name: str, tmp_path: Path) -> None:
    from proctor import sandbox
    from proctor.sandbox.contract import Image, Layer, Resources, SandboxSpec
    from proctor.sandbox.images import ImageStore

    root = tmp_path / "image"
    for folder in ("dev", "proc", "sys", "tmp", "etc", "var/lib/proctor-agent"):
        (root / folder).mkdir(parents=True)
    root.chmod(0o755)
    harness: Any = load_harness(name)
    layers = await harness.layers(ImageStore(), lambda step, total, text: None)
    image = Image(ref="empty", digest="sha256:" + "0" * 64, layers=(Layer(path=root),))
    spec = SandboxSpec(image=image, layers=layers, resources=Resources(memory_mb=3072))
    async with sandbox.create(spec) as box:
        assert harness.version in await harness.probe(box)


SWE = ["pallets__flask-5063", "psf__requests-1142"]


def solution(row: Path) -> list[dict[str, Any]]:
    """Recorded answers that solve a row, made of its own reference patch: look, change, and check what was changed."""
    patch = json.loads((row / "instance.json").read_text())["patch"]
    assert "PROCTOR_PATCH" not in patch
    first = next(line[6:] for line in patch.splitlines() if line.startswith("+++ b/"))
    apply = f"cat > /tmp/fix.patch <<'PROCTOR_PATCH'\n{patch}\nPROCTOR_PATCH\n"
    apply += "git apply --whitespace=nowarn /tmp/fix.patch || patch -p1 < /tmp/fix.patch"
    return [
        called("bash", {"command": f"git status --short | head; sed -n 1,40p {first}"}, "Let me look."),
        called("bash", {"command": apply}, "I know what is wrong."),
        called("bash", {"command": "git diff --stat"}, "Is it there?"),
    ]


@pytest.mark.data
@pytest.mark.parametrize("agent", ["tool-loop", "mini-swe-agent"])
def test_real_tasks_are_resolved_by_recorded_answers(agent: str, tmp_path: Path, shared_data: Path) -> None:
    end = called("finish", {"message": "fixed"}) if agent == "tool-loop" else called("bash", {"command": SUBMIT})
    answers = {}
    for name in SWE:
        row = shared_data / "swe" / name
        problem = json.loads((row / "instance.json").read_text())["problem_statement"]
        # A piece of the instruction chooses the script: the model's first user message has it.
        answers[problem.strip().splitlines()[0][:60]] = [*solution(row), end]
    record = tmp_path / "record"
    with upstream(answers, tmp_path) as url:
        done = proctor(
            "run", *(str(shared_data / "swe" / name) for name in SWE), "--agent", agent, "--model", f"small@{url}",
            "--limit", "total_s=600", "--limit", "tool_call_s=60", "-o", str(record), home=tmp_path / "home",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = sorted((record / "trials").iterdir())
    assert len(trials) == len(SWE)
    for trial in trials:
        result = read(trial, "result.json")
        assert result["outcome"] == "resolved", result
        assert result["usage"]["model_calls"] == 4
        assert result["usage"]["prompt_tokens"] == 40
        steps = [step for step in read(trial, "trajectory.json")["steps"] if step["source"] == "agent"]
        assert len(steps) == 4
        assert "1 file changed" in json.dumps(steps[2]["observation"]["results"][0]["content"])
        # The same trial again, from its record alone: no model, and no difference.
        again = proctor("replay", str(record), trial.name, "--model-calls", home=tmp_path / "home")
        assert again.returncode == 0, again.stdout
        assert "0 differences" in again.stdout
