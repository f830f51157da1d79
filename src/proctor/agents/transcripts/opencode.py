"""The output of `opencode run --format json`: one event on each line; a step lies between two of them."""

from __future__ import annotations

from typing import Any

from proctor.agents.transcripts.told import Told, claimed, lines, mapping, spoke, text


def read(data: bytes) -> Told:
    """One step for each answer of the model; a tool event has the call and its result together."""
    told = Told()
    for event in lines(data, told):
        part = mapping(event.get("part"))
        kind = event.get("type")
        if kind == "step_start" or not told.steps:
            told.steps.append(spoke("", event.get("timestamp"), []))
        step = told.steps[-1]
        match kind:
            case "step_start":
                pass
            case "text":
                step.message = "\n".join(piece for piece in (step.message, text(part.get("text"))) if piece)
                told.final_message = text(part.get("text"))
            case "reasoning":
                thought = text(part.get("text"))
                step.reasoning = "\n".join(piece for piece in (step.reasoning, thought) if piece) or None
            case "tool_use":
                _tool(part, told)
            case "step_finish":
                tokens = mapping(part.get("tokens"))
                cache = {f"cache_{name}": number for name, number in claimed(tokens.get("cache")).items()}
                step.extra["claimed_usage"] = claimed(tokens) | cache
            case "error":
                error = mapping(event.get("error"))
                said = text(mapping(error.get("data")).get("message")) or text(error.get("name"))
                step.extra["error"] = said[:2000]
            case _:
                told.lose(f"an event of type {text(kind)[:40]!r}")
    return told.close()


def _tool(part: dict[str, Any], told: Told) -> None:
    state = mapping(part.get("state"))
    call = told.call(part.get("callID"), part.get("tool"), mapping(state.get("input")))
    told.steps[-1].tool_calls.append(call)
    failed = state.get("status") == "error"
    told.result(call.call_id, state.get("error") if failed else state.get("output"), failed=failed)
    time = mapping(state.get("time"))
    if isinstance(time.get("start"), (int, float)) and isinstance(time.get("end"), (int, float)):
        call.duration_s = max(0.0, (time["end"] - time["start"]) / 1000)
