"""Codex's session file (`rollout-*.jsonl`): response items as they went to and from the model, one on each line."""

from __future__ import annotations

from typing import Any

from proctor.agents.contract import Step
from proctor.agents.transcripts.told import Told, claimed, items, lines, mapping, moment, spoke, text


def read(data: bytes) -> Told:
    """Items between two usage records are one answer of the model."""
    reader = _Reader()
    for line in lines(data, reader.told):
        payload = mapping(line.get("payload"))
        match line.get("type"):
            case "session_meta":
                instructions = text(mapping(payload.get("base_instructions")).get("text"))
                if instructions:
                    reader.told.steps.append(Step("system", instructions, moment(line.get("timestamp"))))
            case "turn_context":
                reader.model = text(payload.get("model")) or None
            case "response_item":
                reader.item(payload, line.get("timestamp"))
            case "token_usage_record":
                reader.usage(payload.get("usage"))
            case "event_msg" if payload.get("type") == "task_complete":
                reader.told.final_message = text(payload.get("last_agent_message"))
            case _:
                pass  # notes of the program to itself
    return reader.told.close()


class _Reader:
    def __init__(self) -> None:
        self.told = Told()
        self.model: str | None = None
        self._answer: Step | None = None

    def item(self, payload: dict[str, Any], at: Any) -> None:
        """One item of the conversation."""
        match payload.get("type"):
            case "message" if payload.get("role") == "assistant":
                step = self._open(at)
                step.message = "\n".join(part for part in (step.message, text(payload.get("content"))) if part)
            case "message":
                source = "user" if payload.get("role") == "user" else "system"
                self._answer = None
                self.told.steps.append(Step(source, text(payload.get("content")), moment(at)))  # type: ignore[arg-type]
            case "reasoning":
                said = [text(part.get("text")) for key in ("summary", "content") for part in items(payload.get(key))]
                step = self._open(at)
                step.reasoning = "\n".join(part for part in (step.reasoning, *said) if part) or None
            case "function_call":
                call = self.told.call(payload.get("call_id"), payload.get("name"), payload.get("arguments"))
                self._open(at).tool_calls.append(call)
            case "custom_tool_call":
                call = self.told.call(
                    payload.get("call_id"), payload.get("name"), {"input": text(payload.get("input"))}
                )
                self._open(at).tool_calls.append(call)
            case "local_shell_call":
                action = mapping(payload.get("action"))
                call = self.told.call(payload.get("call_id") or payload.get("id"), "local_shell", action)
                self._open(at).tool_calls.append(call)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._answer = None
                output = payload.get("output")
                content = mapping(output).get("content", output)
                self.told.result(payload.get("call_id"), content)
            case kind:
                self.told.lose(f"an item of type {text(kind)[:40]!r}")

    def usage(self, usage: Any) -> None:
        """What the answer that just ended is said to have used."""
        step = self._answer or next((one for one in reversed(self.told.steps) if one.source == "agent"), None)
        if step is not None:
            step.extra["claimed_usage"] = claimed(usage)
        self._answer = None

    def _open(self, at: Any) -> Step:
        if self._answer is None:
            self._answer = spoke("", at, [], model=self.model)
            self.told.steps.append(self._answer)
        return self._answer
