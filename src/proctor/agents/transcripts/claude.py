"""The `stream-json` output of Claude Code, which Qwen Code also writes: one event on each line of standard output."""

from __future__ import annotations

from typing import Any

from proctor.agents.contract import Step
from proctor.agents.transcripts.told import Told, claimed, items, lines, mapping, moment, spoke, text


def read(data: bytes) -> Told:
    """One step for each answer of the model; results come as user events.

    The blocks of an answer come one event at a time, not always under one id; but between two answers there is always
    a result.
    """
    told = Told()
    speaker: str | None = None
    for event in lines(data, told):
        message = mapping(event.get("message"))
        match event.get("type"):
            case "assistant":
                subagent_of = text(event.get("parent_tool_use_id"))
                if speaker != subagent_of:
                    told.steps.append(spoke("", event.get("timestamp"), [], model=message.get("model")))
                    speaker = subagent_of
                    if subagent_of:
                        told.steps[-1].extra["subagent_of"] = subagent_of
                _add_blocks(told.steps[-1], message, told)
            case "user":
                speaker = None
                _add_results(message, event, told)
            case "result":
                told.final_message = text(event.get("result"))
                if told.steps:
                    told.steps[-1].extra["claimed_total_usage"] = claimed(event.get("usage"))
            case "system" | "stream_event" | "rate_limit_event":
                pass
            case kind:
                told.lose(f"an event of type {text(kind)[:40]!r}")
    return told.close()


def _add_blocks(step: Step, message: dict[str, Any], told: Told) -> None:
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else items(content)
    for block in blocks:
        match block.get("type"):
            case "text":
                step.message = "\n".join(part for part in (step.message, text(block.get("text"))) if part)
            case "thinking":
                thought = text(block.get("thinking"))
                step.reasoning = "\n".join(part for part in (step.reasoning, thought) if part) or None
            case "tool_use" | "server_tool_use":
                step.tool_calls.append(told.call(block.get("id"), block.get("name"), block.get("input") or {}))
            case kind:
                told.lose(f"a block of type {text(kind)[:40]!r}")
    if usage := claimed(message.get("usage")):
        step.extra["claimed_usage"] = usage


def _add_results(message: dict[str, Any], event: dict[str, Any], told: Told) -> None:
    content = message.get("content")
    said = [content] if isinstance(content, str) else []
    for block in items(content):
        if block.get("type") == "tool_result":
            told.result(block.get("tool_use_id"), block.get("content"), failed=block.get("is_error") is True)
        elif block.get("type") == "text":
            said.append(text(block.get("text")))
    if said:
        told.steps.append(Step("user", text("\n".join(said)), moment(event.get("timestamp"))))
