"""Single trials in real sandboxes: models, harnesses of all manners, and who is at fault for how they end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from tests.runs.toys import make_toy

from proctor.agents.contract import AgentResult, HarnessContext, StopReason
from proctor.common import InfraError
from proctor.models.scripted import ScriptedServer, call, calls, fault, say
from proctor.runs.engine import Execution, execute
from proctor.runs.examiner import opened
from proctor.runs.formats import DiffFile, ExecLine, ModelCallLine, ReceiptFile, TrialResult, dump_json, load, parse
from proctor.runs.outcome import Outcome
from proctor.runs.preparation import prepare_all
from proctor.runs.progress import LineProgress
from proctor.runs.record import read_lines
from proctor.runs.request import Request, plan_request
from proctor.sandbox import Edge, SandboxSpec
from proctor.trajectories.atif import read_trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


class Custom:
    """A harness whose `run` is given by the test."""

    name = "custom"
    version = "1"
    needs_model = False

    async def run(self, context: HarnessContext) -> AgentResult:
        return await BEHAVIOUR[0](context)


BEHAVIOUR: list[Callable[[HarnessContext], Any]] = []
CUSTOM = f"custom={__name__}:Custom"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
async def run(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Run one trial of a toy: `await run(agent, model=…, limits=…)` gives its result and its directory."""
    monkeypatch.setenv("PROCTOR_HOME", str(home))
    make_toy(tmp_path / "toys", "toy")

    more_runs = ["second", "first"]

    async def one(agent: str, **more: Any) -> tuple[TrialResult, Path]:
        plan = plan_request(Request((str(tmp_path / "toys"),), (agent,), **more))
        preparation = await prepare_all(plan, LineProgress(lambda line: None))
        run_dir = tmp_path / more_runs.pop()
        run_dir.mkdir()
        async with opened(plan, preparation) as examiner:
            execution: Execution = await execute(
                plan, run_dir, examiner, concurrency=1, backoff=lambda tries, jitter: 0.0
            )
        (result,) = execution.results.values()
        return result, run_dir / "trials" / result.trial_id

    return one


def acting(behaviour: Callable[[HarnessContext], Any]) -> str:
    BEHAVIOUR[:] = [behaviour]
    return CUSTOM


async def test_a_model_solves_it_and_everything_it_said_is_on_record(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXAM_KEY", "very-secret-key")
    script = [
        calls(("bash", "{not json"), text="let me see"),
        call("bash", command="printf 42 > answer.txt; printf '\\033[2J\\000\\377'"),
        call("finish", message="done"),
    ]
    async with ScriptedServer(script) as server:
        model = tmp_path / "model.toml"
        model.write_text(f'name = "scripted-1"\nbase_url = "{server.base_url}"\napi_key_env = "EXAM_KEY"\nseed = 7\n')
        result, directory = await run("tool-loop", models=(str(model),))
        assert server.requests[0].headers["authorization"] == "Bearer very-secret-key"
    assert (result.outcome, result.stop, result.final_message) == (Outcome.RESOLVED, "finished", "done")
    assert result.usage.model_calls == 3
    lines = [
        parse(ModelCallLine, dump_json(line), name="calls") for line in read_lines(directory / "model-calls.jsonl")
    ]
    assert [line.seq for line in lines] == [1, 2, 3]
    assert all(line.requested_model == "scripted-1" and line.response and line.returned_model for line in lines)
    trajectory = read_trajectory(directory / "trajectory.json")
    assert (trajectory.schema_version, trajectory.agent.name, trajectory.agent.model_name) == (
        "ATIF-v1.8", "tool-loop", "scripted-1")  # fmt: skip
    assert trajectory.agent.tool_definitions
    tool_calls = [one for step in trajectory.steps for one in step.tool_calls or ()]
    assert [one.function_name for one in tool_calls] == ["bash", "bash", "finish"]
    assert tool_calls[0].extra
    assert tool_calls[0].extra["raw_arguments"] == "{not json"
    execs = [parse(ExecLine, dump_json(line), name="exec") for line in read_lines(directory / "exec.jsonl")]
    assert any(line.stdout and line.stdout.base64 for line in execs)
    for path in directory.rglob("*"):
        assert path.is_dir() or b"very-secret-key" not in path.read_bytes(), path


@pytest.mark.parametrize("path", ["a\0b", "", "x" * 10_000, "/proc/1/mem", "\ud800"], ids=ascii)
async def test_no_argument_of_a_tool_stops_the_run_or_leaves_the_denominator(
    path: str, run: Callable[..., Any]
) -> None:
    arguments = json.dumps({"path": path}), json.dumps({"command": f"cat {path}"})
    script = [calls(("read_file", arguments[0]), ("bash", arguments[1])), call("finish")]
    async with ScriptedServer(script) as server:
        result, _ = await run("tool-loop", models=(f"m@{server.base_url}",))
    assert (result.outcome, result.tries) == (Outcome.UNRESOLVED, 1)


async def test_a_dead_endpoint_is_infrastructure_and_retried(run: Callable[..., Any], tmp_path: Path) -> None:
    async with ScriptedServer(lambda request: fault(503)) as server:
        model = tmp_path / "model.toml"
        model.write_text(f'name = "m"\nbase_url = "{server.base_url}"\nmax_retries = 0\n')
        result, directory = await run("tool-loop", models=(str(model),))
        assert len(server.requests) == 4
    assert (result.outcome, result.tries, result.verdict) == (Outcome.INFRA_ERROR, 4, None)
    assert "503" in result.detail
    assert [line["error"] for line in read_lines(directory / "model-calls.jsonl")]


async def test_a_fault_in_grading_does_not_make_the_agent_work_twice(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, worked, create = ["no room", "still none"], [], Edge.create

    async def failing(self: Edge, spec: SandboxSpec, **more: Any) -> Any:
        if spec.labels.get("proctor.purpose") == "grading" and faults:
            raise InfraError(faults.pop(0))
        return await create(self, spec, **more)

    async def works(context: HarnessContext) -> AgentResult:
        worked.append(await context.room.bash("printf 42 > answer.txt"))
        return AgentResult(StopReason.FINISHED)

    monkeypatch.setattr(Edge, "create", failing)
    monkeypatch.setattr("proctor.runs.examiner.backoff_s", lambda tries, jitter: 0.0)
    result, directory = await run(acting(works))
    assert (result.outcome, result.tries, len(worked)) == (Outcome.RESOLVED, 1, 1)
    findings = json.loads((directory / "findings.json").read_text())["findings"]
    assert [one["detail"] for one in findings if one["kind"] == "graded-again"] == ["no room", "still none"]


async def test_a_refused_conversation_is_the_agents_doing_unless_it_is_the_first(run: Callable[..., Any]) -> None:
    for script, expected in (
        ([call("bash", command="true"), fault(400, "bad arguments in the history")], (Outcome.UNRESOLVED, 1)),
        ([fault(401, "no such key")], (Outcome.INFRA_ERROR, 4)),
    ):
        async with ScriptedServer(script) as server:
            result, _ = await run("tool-loop", models=(f"m@{server.base_url}",))
        assert (result.outcome, result.tries, result.stop) == (*expected, "model_error")


async def test_a_harness_that_only_says_so_gets_no_retry(run: Callable[..., Any]) -> None:
    async def claims(context: HarnessContext) -> AgentResult:
        return AgentResult(StopReason.MODEL_ERROR, "honestly, it was the endpoint")

    result, _ = await run(acting(claims))
    assert (result.outcome, result.tries) == (Outcome.UNRESOLVED, 1)


async def test_a_limit_that_fires_after_the_work_is_done_is_still_a_limit(run: Callable[..., Any]) -> None:
    async def slow(context: HarnessContext) -> AgentResult:
        await context.room.write("answer.txt", b"42")
        await anyio.sleep(60)
        return AgentResult(StopReason.FINISHED)

    result, _ = await run(acting(slow), limits=("total_s=1",))
    assert (result.outcome, result.stop, result.verdict) == (Outcome.AGENT_LIMIT, "limit:total_time", "resolved")


async def test_a_harness_that_breaks_is_graded_on_what_it_left(run: Callable[..., Any]) -> None:
    async def breaks(context: HarnessContext) -> AgentResult:
        await context.room.write("answer.txt", b"42")
        raise ZeroDivisionError("oops")

    result, directory = await run(acting(breaks))
    assert (result.outcome, result.stop, result.tries) == (Outcome.RESOLVED, "error", 1)
    assert "ZeroDivisionError" in (directory / "logs" / "harness.log").read_text()


@pytest.mark.parametrize(
    "command",
    [
        "python3 -c 'x = bytearray(1 << 30)'",
        "for i in $(seq 2000); do sleep 5 & done; wait",
        "dd if=/dev/zero of=/app/big bs=1M count=500",
        "kill -9 -1; kill -9 1",
    ],
    ids=["memory", "pids", "disk", "kill"],
)
@pytest.mark.slow
async def test_a_candidate_that_exhausts_its_room_buys_no_retry(command: str, run: Callable[..., Any]) -> None:
    async def hog(context: HarnessContext) -> AgentResult:
        await context.room.bash(command)
        await context.room.bash("true")
        return AgentResult(StopReason.FINISHED)

    result, directory = await run(acting(hog), limits=("tool_call_s=10",))
    assert result.tries == 1
    assert result.outcome in (Outcome.UNRESOLVED, Outcome.AGENT_LIMIT)
    assert load(ReceiptFile, directory / "receipt.json").agent


NASTY = r"""
printf 42 > answer.txt
printf x > "$(printf 'a\377\nb')"
mkfifo pipe; ln -s / root; ln -s loop loop; mkdir -p .tmp-x 'sp ace'
python3 - <<'PY'
import os, socket
for _ in range(400):
    os.mkdir("d" * 100); os.chdir("d" * 100)
open("deep", "w").write("x")
os.chdir("/app")
socket.socket(socket.AF_UNIX).bind("sock")
with open("sparse", "wb") as file:
    file.truncate(30 << 20)
for number in range(3000):
    open(f"many-{number}", "w").close()
PY
chmod 000 answer.txt; chmod 4755 sparse; touch -d 1900-01-01 pipe
"""


async def test_a_nasty_disk_is_recorded_and_graded(run: Callable[..., Any]) -> None:
    """Undecodable names, links to everywhere, a path longer than any system call takes, a mode that forbids reading."""

    async def acts(context: HarnessContext) -> AgentResult:
        done = await context.room.bash(NASTY)
        assert done.ok, done.error_text
        return AgentResult(StopReason.FINISHED)

    result, directory = await run(acting(acts))
    assert (result.tries, result.verdict is not None) == (1, True), result.detail
    diff = load(DiffFile, directory / "diff.json")
    assert len(diff.entries) > 3400
    assert "/app/a\udcff\nb" in {entry.path for entry in diff.entries}
    assert (directory / "diff.tar.zst").stat().st_size > 0


async def test_bad_options_stop_the_run_with_one_error(tmp_path: Path) -> None:
    from proctor.common import ConfigError

    make_toy(tmp_path / "toys", "toy")
    with pytest.raises(ConfigError, match="surprise"):
        plan_request(Request((str(tmp_path / "toys"),), ("scripted",), options=("surprise=1",)))


async def test_a_text_answer_is_on_record_too(run: Callable[..., Any]) -> None:
    script = [say("```bash\nprintf 42 > answer.txt\n```"), say("TASK_FINISHED")]
    async with ScriptedServer(script) as server:
        result, directory = await run("text-loop", models=(f"m@{server.base_url}",), limits=("steps=3",))
    assert result.verdict == "resolved"
    assert read_trajectory(directory / "trajectory.json").steps[0].source in ("system", "user")
