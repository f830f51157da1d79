"""The tool loop: a model, five tools, an explicit end. The loop itself is `ToolLoop.run`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from proctor.agents.contract import AgentResult, HarnessContext, StopReason, ToolCall
from proctor.agents.steps import act, answered, ask, open_conversation, parse_options, said
from proctor.agents.tools import Toolbox, definitions

if TYPE_CHECKING:
    from proctor.models.contract import ModelAnswer

SYSTEM_PROMPT = """\
You work on a task inside a Linux computer of your own, through tools. Nobody answers questions: decide for yourself.
Look before you change anything, keep changes small, and check your work by running it.
When the task is done and checked, call `finish`. Only the state of the computer counts, not what you say about it."""

NUDGE = "There was no tool call in your answer. Go on with a tool call, or call `finish` if the task is done."


class Options(BaseModel):
    """What `--agent tool-loop` takes."""

    model_config = ConfigDict(extra="forbid")
    system_prompt: str = SYSTEM_PROMPT
    nudge: str = NUDGE
    max_nudges: int = Field(default=3, ge=0)
    """Answers without a tool call, in a row, before the harness gives up for the model."""
    max_bad_replies: int = Field(default=3, ge=0)
    """Unusable replies of the endpoint, in a row, before the trial ends with MODEL_ERROR."""
    output_chars: int = Field(default=16_000, ge=200)
    """How much of one tool result the model sees."""


class ToolLoop:
    """OpenAI-style tool calling: ask, run every call, hand back the results, until `finish` or a limit."""

    name = "tool-loop"
    version = "1"
    needs_model = True
    options_model = Options

    async def run(self, context: HarnessContext) -> AgentResult:
        """The loop. Limits are not its business: the model, room and recorder of the context raise them."""
        options = parse_options(Options, self.name, context.options)
        tools = Toolbox(context.room, options.output_chars)
        definition = definitions(context.limits.tool_call_s)
        messages = open_conversation(context, options.system_prompt)
        silent_turns = 0
        while True:
            answer = await ask(context, messages, definition, max_bad_replies=options.max_bad_replies)
            calls = tool_calls(answer, turn=len(messages))
            await act(context, tools, answered(answer, calls))
            if tools.finished is not None:
                return AgentResult(StopReason.FINISHED, final_message=tools.finished)

            messages += exchange(answer, calls)
            silent_turns = 0 if calls else silent_turns + 1
            if silent_turns > options.max_nudges:
                detail = f"{silent_turns} answers in a row without a tool call"
                return AgentResult(StopReason.GAVE_UP, detail, final_message=answer.text)
            if silent_turns:
                messages.append({"role": "user", "content": options.nudge})
                context.recorder.step(said("user", options.nudge))


def tool_calls(answer: ModelAnswer, *, turn: int) -> list[ToolCall]:
    """The calls of an answer, each with an id of its own: some models repeat one id, or send none."""
    calls: list[ToolCall] = []
    used: set[str] = set()
    for number, sent in enumerate(answer.tool_calls, 1):
        unique = bool(sent.call_id) and sent.call_id not in used
        call_id = sent.call_id if unique else f"call-{turn}-{number}"
        used.add(call_id)
        extra = {} if unique else {"sent_id": sent.call_id}
        calls.append(ToolCall(call_id, sent.name, {}, sent.arguments, extra=extra))
    return calls


def exchange(answer: ModelAnswer, calls: list[ToolCall]) -> list[dict[str, Any]]:
    """The answer and its results as messages for the next call.

    Arguments that are not a JSON object go back as `{}` (the error result quotes them): endpoints parse the
    history and refuse the whole conversation for one bad call in it.
    """
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in calls
        ]
    results = [{"role": "tool", "tool_call_id": call.call_id, "content": call.result} for call in calls]
    return [message, *results]
