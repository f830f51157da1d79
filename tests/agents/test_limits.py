"""Every limit, by exceeding it; and that a sandbox that is lost is never an agent's failure."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import anyio
import pytest

from proctor.agents import AgentResult, StopReason, load_harness, run_harness
from proctor.agents.steps import acted
from proctor.common import ConfigError, InfraError, RefusedError
from proctor.models import ModelSpec, OpenAIChatClient, Usage
from proctor.models.scripted import ScriptedServer, call, calls, fault, say
from proctor.sandbox.contract import EndReason, SandboxLost

pytestmark = pytest.mark.anyio


class Custom:
    """A harness made of one function."""

    name, version, needs_model = "custom", "1", False

    def __init__(self, act: Any) -> None:
        self.act = act

    async def run(self, context: Any) -> AgentResult:
        return await self.act(context)


async def examine(act: Any, box: Any, task: Any, recorder: Any, limits: Any, **more: Any) -> AgentResult:
    harness = load_harness(act) if isinstance(act, str) else Custom(act)
    return await run_harness(harness, sandbox=box, task=task, recorder=recorder, limits=limits, **more)


async def with_model(turns: Any, box: Any, task: Any, recorder: Any, limits: Any, **spec: Any) -> AgentResult:
    async with ScriptedServer(turns) as server:
        client = OpenAIChatClient(ModelSpec("small", server.base_url, **spec))
        try:
            return await examine("tool-loop", box, task, recorder, limits, model=client)
        finally:
            await client.aclose()


async def test_the_step_limit(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    limits = replace(limits, steps=3)
    result = await with_model(lambda _: call("bash", command="echo x >> log"), box, task, recorder, limits)
    assert result.stop is StopReason.LIMIT_STEPS
    assert len(recorder.agent_steps) == 3
    assert (box.root / "log").read_text() == "x\n" * 3


async def test_finishing_with_the_last_step_is_finishing(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    limits = replace(limits, steps=2)
    result = await with_model([call("bash", command="true"), call("finish")], box, task, recorder, limits)
    assert result.stop is StopReason.FINISHED


async def test_the_total_time_cuts_a_hung_model(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    limits = replace(limits, total_s=0.5)
    start = time.monotonic()
    result = await with_model([say("late", delay_s=30)], box, task, recorder, limits)
    assert result.stop is StopReason.LIMIT_TIME
    assert "during a model call" in result.detail
    assert time.monotonic() - start < 2.5


@pytest.mark.parametrize("answer", [fault(503), say("late", delay_s=30)], ids=["failing", "hung"])
async def test_an_endpoint_that_fails_to_the_end_is_not_the_time_limit(
    box: Any, task: Any, recorder: Any, limits: Any, answer: Any
) -> None:
    limits = replace(limits, total_s=1.0)
    result = await with_model(lambda _: answer, box, task, recorder, limits, timeout_s=0.3)
    assert result.stop is StopReason.MODEL_ERROR
    assert "tries" in result.detail


async def test_time_that_the_endpoint_lost_is_given_back(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    limits = replace(limits, total_s=2.0)  # the wait takes 1 to 1.5 s of it
    turns = [[fault(429, retry_after="1"), call("bash", command="sleep 1.2")], call("finish")]
    start = time.monotonic()
    result = await with_model(turns, box, task, recorder, limits)
    assert time.monotonic() - start > 2.1
    assert result.stop is StopReason.FINISHED


async def test_the_total_time_cuts_a_hung_tool(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    limits = replace(limits, total_s=0.6)
    result = await with_model([call("bash", command="echo begun; sleep 30")], box, task, recorder, limits)
    assert result.stop is StopReason.LIMIT_TIME
    assert "begun" in recorder.agent_steps[0].tool_calls[0].result


async def test_the_total_time_cuts_a_harness_that_hangs(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    async def sleep(_: Any) -> AgentResult:
        await anyio.sleep_forever()
        return AgentResult(StopReason.FINISHED)

    start = time.monotonic()
    result = await examine(sleep, box, task, recorder, replace(limits, total_s=0.2))
    assert result.stop is StopReason.LIMIT_TIME
    assert time.monotonic() - start < 1.0


async def test_finishing_too_late_is_the_time_limit(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    async def late(_: Any) -> AgentResult:
        await anyio.sleep(0.3)
        return AgentResult(StopReason.FINISHED)

    assert (await examine(late, box, task, recorder, replace(limits, total_s=0.2))).stop is StopReason.LIMIT_TIME


async def test_the_tool_call_limit_is_an_error_for_the_model(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    limits = replace(limits, tool_call_s=0.3)
    turns = [call("bash", command="echo begun; sleep 30", timeout_s=25), call("finish")]
    result = await with_model(turns, box, task, recorder, limits)
    assert result.stop is StopReason.FINISHED
    done = recorder.agent_steps[0].tool_calls[0]
    assert done.error.startswith("timeout: ")
    assert "begun" in done.result
    assert done.duration_s < 3


async def test_the_token_limit(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    limits = replace(limits, tokens=100)
    usage = {"prompt_tokens": 60, "completion_tokens": 10}

    def answer(_: Any) -> Any:
        return replace(call("bash", command="echo x >> log"), usage=usage)

    result = await with_model(answer, box, task, recorder, limits)
    assert result.stop is StopReason.LIMIT_TOKENS
    assert "140 tokens used, the limit is 100" in result.detail
    assert (box.root / "log").read_text() == "x\n"
    assert recorder.agent_steps[-1].tool_calls[0].error == "not completed: the trial ended"


async def test_finishing_over_the_token_limit_is_the_limit(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    turns = [replace(call("finish"), usage={"prompt_tokens": 60, "completion_tokens": 60})]
    result = await with_model(turns, box, task, recorder, replace(limits, tokens=100))
    assert result.stop is StopReason.LIMIT_TOKENS


async def test_the_cost_limit(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    limits = replace(limits, cost_usd=0.01)
    prices = {"prompt": 1000.0, "completion": 0.0}
    result = await with_model(lambda _: call("bash", command="true"), box, task, recorder, limits, prices=prices)
    assert result.stop is StopReason.LIMIT_COST
    assert len(recorder.agent_steps) == 2


async def test_a_cost_limit_without_prices_is_refused(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    with pytest.raises(RefusedError, match=r"limits\.cost_usd.*price of small is unknown"):
        await with_model([call("finish")], box, task, recorder, replace(limits, cost_usd=1.0))


async def test_a_token_limit_without_usage_is_refused(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    turns = [replace(call("finish"), usage=None)]
    with pytest.raises(RefusedError, match=r"limits\.tokens.*reports no token usage"):
        await with_model(turns, box, task, recorder, replace(limits, tokens=100))


async def test_a_limit_in_the_middle_of_several_calls(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    sleep = ("bash", {"command": "sleep 0.4; echo x >> log"})
    await with_model([calls(sleep, sleep, sleep, sleep)], box, task, recorder, replace(limits, total_s=1.0))
    made = recorder.agent_steps[0].tool_calls
    assert made[0].error is None
    assert made[-1].error == "not completed: the trial ended"


async def test_a_harness_that_swallows_the_limit_gains_nothing(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    async def stubborn(context: Any) -> AgentResult:
        for _ in range(50):
            try:
                await context.room.bash("echo x >> log")
                context.recorder.step(acted())
            except Exception:  # noqa: BLE001, S110, PERF203, RUF100 - the point of the test
                pass
        return AgentResult(StopReason.FINISHED)

    result = await examine(stubborn, box, task, recorder, replace(limits, steps=3))
    assert result.stop is StopReason.LIMIT_STEPS
    assert (box.root / "log").read_text() == "x\n" * 3


async def test_what_a_harness_left_running_cannot_act(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    rooms = []

    async def leak(context: Any) -> AgentResult:
        rooms.append(context.room)
        return AgentResult(StopReason.FINISHED)

    await examine(leak, box, task, recorder, limits)
    with pytest.raises(InfraError, match="has ended"):
        await rooms[0].bash("touch late")


@pytest.mark.parametrize("harness", ["tool-loop", "text-loop"])
async def test_a_lost_sandbox_is_raised(box: Any, task: Any, recorder: Any, limits: Any, harness: str) -> None:
    async def lose(*_: Any, **__: Any) -> Any:
        raise SandboxLost("the sandbox is gone", reason=EndReason.OOM)

    box.exec = lose
    turns = [replace(call("bash", command="true"), text="```bash\ntrue\n```")]
    async with ScriptedServer(turns) as server:
        client = OpenAIChatClient(ModelSpec("small", server.base_url))
        with pytest.raises(SandboxLost):
            await examine(harness, box, task, recorder, limits, model=client)
        await client.aclose()
    assert recorder.agent_steps[0].tool_calls[0].error == "not completed: the trial ended"


async def test_a_lost_sandbox_in_a_task_group_is_raised(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    async def lose() -> None:
        raise SandboxLost("gone", reason=EndReason.GUEST_LOST)

    async def grouped(_: Any) -> AgentResult:
        async with anyio.create_task_group() as group:
            group.start_soon(lose)
        return AgentResult(StopReason.FINISHED)

    with pytest.raises(SandboxLost):
        await examine(grouped, box, task, recorder, limits)


async def test_a_guest_that_does_not_answer_is_a_lost_sandbox(
    box: Any, task: Any, recorder: Any, limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any, **__: Any) -> Any:
        await anyio.sleep_forever()

    async def act(context: Any) -> AgentResult:
        await context.room.run(["true"])
        return AgentResult(StopReason.FINISHED)

    monkeypatch.setattr("proctor.agents.room._KILL_GRACE_S", 0.05)
    box.exec = hang
    with pytest.raises(SandboxLost, match="did not answer"):
        await examine(act, box, task, recorder, replace(limits, total_s=0.2))


async def test_a_crash_of_the_harness_is_its_own_error(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    async def crash(_: Any) -> AgentResult:
        raise ZeroDivisionError("oops\nmore")

    result = await examine(crash, box, task, recorder, limits)
    assert result.stop is StopReason.ERROR
    assert result.detail == "ZeroDivisionError: oops"
    assert "Traceback" in recorder.lines[0]


async def test_a_harness_that_returns_something_else(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    async def nothing(_: Any) -> Any:
        return None

    result = await examine(nothing, box, task, recorder, limits)
    assert result == AgentResult(StopReason.ERROR, "custom returned NoneType, not AgentResult")


async def test_the_cause_of_a_lost_sandbox_is_kept(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    async def lose(_: Any) -> AgentResult:
        try:
            raise OSError("the pipe broke")
        except OSError as error:
            raise SandboxLost("gone", reason=EndReason.GUEST_LOST) from error

    with pytest.raises(SandboxLost) as caught:
        await examine(lose, box, task, recorder, limits)
    assert isinstance(caught.value.__cause__, OSError)


async def test_cancellation_passes(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    async def wait(context: Any) -> AgentResult:
        await context.room.bash("sleep 30")
        return AgentResult(StopReason.FINISHED)

    with anyio.move_on_after(0.3) as scope:
        await examine(wait, box, task, recorder, limits)
    assert scope.cancelled_caught


async def test_a_harness_that_needs_a_model_says_so(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    with pytest.raises(ConfigError, match="tool-loop needs a model"):
        await examine("tool-loop", box, task, recorder, limits)


async def test_every_call_is_reported_by_the_host(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    events: list[Any] = []

    async def act(context: Any) -> AgentResult:
        await context.room.write("a", b"text")
        await context.room.read("a")
        await context.room.list(".")
        await context.room.bash("echo hi; exit 4")
        with pytest.raises(Exception, match="No such file"):
            await context.room.read("absent")
        return AgentResult(StopReason.FINISHED)

    await examine(act, box, task, recorder, limits, on_event=events.append)
    lines = [event.as_json() for event in events]
    assert [line["kind"] for line in lines] == ["write", "read", "list", "bash", "read"]
    assert lines[0]["digest"] == lines[1]["digest"]
    assert lines[0]["size_bytes"] == 4
    assert (lines[3]["exit_code"], lines[3]["stdout"]["bytes"]) == (4, 3)
    assert "No such file" in lines[4]["error"]
    assert all(line["duration_s"] >= 0 and line["limit_s"] <= limits.tool_call_s for line in lines)


async def test_usage_that_is_unknown_is_not_zero(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    await with_model([replace(call("finish"), usage=None)], box, task, recorder, limits)
    assert recorder.agent_steps[0].usage == Usage()
