"""mini-swe-agent's trajectory file (`mini-swe-agent-1.x`): one JSON document with the conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.agents.contract import Step
from proctor.agents.transcripts.told import (
    Told,
    TranscriptError,
    claimed,
    items,
    mapping,
    moment,
    parsed_json,
    spoke,
    text,
)

if TYPE_CHECKING:
    from proctor.agents.contract import ToolCall


def read(data: bytes) -> Told:
    """System and user messages, one step for each answer, results from the messages after it."""
    document = parsed_json(data)
    if not isinstance(document, dict):
        raise TranscriptError("the file is not one JSON object")
    told = Told()
    info = mapping(mapping(document).get("info"))
    messages = items(mapping(document).get("messages"))
    task_seen = False
    for message in messages:
        extra = mapping(message.get("extra"))
        match message.get("role"):
            case "system":
                told.steps.append(Step("system", text(message.get("content")), moment(extra.get("timestamp"))))
            case "user":
                # What the harness was given is recorded already; the first one is that, in the agent's template.
                step = Step("user", text(message.get("content")), moment(extra.get("timestamp")))
                if not task_seen:
                    step.extra["rendered_instruction"] = True
                task_seen = True
                told.steps.append(step)
            case "assistant":
                told.steps.append(_answer(message, extra, told))
            case "tool":
                code = extra.get("returncode")
                shown = {"returncode": code} if isinstance(code, int) else {}
                told.result(message.get("tool_call_id"), message.get("content"), extra=shown)
            case "exit":
                told.final_message = text(extra.get("submission")) or text(message.get("content"))
            case _ if message.get("object") == "response":
                told.steps.append(_response(message, extra, told))
            case _ if message.get("type") == "function_call_output":
                told.result(message.get("call_id"), message.get("output"))
            case role:
                told.lose(f"a message with the role {text(role)[:40]!r}")
    told.close()
    status = text(info.get("exit_status"))
    if told.steps:
        told.steps[-1].extra["exit_status"] = status
    return told


def _answer(message: dict[str, Any], extra: dict[str, Any], told: Told) -> Step:
    calls: list[ToolCall] = []
    for call in items(message.get("tool_calls")):
        function = mapping(call.get("function"))
        calls.append(told.call(call.get("id"), function.get("name"), function.get("arguments")))
    response = mapping(extra.get("response"))
    step = spoke(text(message.get("content")), extra.get("timestamp"), calls, model=response.get("model"),
                 reasoning=text(message.get("reasoning_content")) or None)  # fmt: skip
    if usage := claimed(response.get("usage")):
        step.extra["claimed_usage"] = usage
    return step


def _response(message: dict[str, Any], extra: dict[str, Any], told: Told) -> Step:
    """A turn of its class for the Responses protocol."""
    said: list[str] = []
    calls: list[ToolCall] = []
    for item in items(message.get("output")):
        if item.get("type") == "message":
            said.append(text(item.get("content")))
        elif item.get("type") == "function_call":
            calls.append(told.call(item.get("call_id"), item.get("name"), item.get("arguments")))
    step = spoke("\n".join(said), extra.get("timestamp"), calls, model=message.get("model"))
    if usage := claimed(message.get("usage")):
        step.extra["claimed_usage"] = usage
    return step
