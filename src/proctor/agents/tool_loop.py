"""The tool loop: a model, its tools, an explicit end. The loop itself is `ToolLoop.run`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from proctor.agents.acting import Parallel, act
from proctor.agents.contract import AgentResult, HarnessContext, StopReason, ToolCall
from proctor.agents.conversation import Conversation
from proctor.agents.simulated_user import UserDesk
from proctor.agents.steps import answered, ask, open_conversation, parse_options, said
from proctor.agents.tools import Toolbox
from proctor.agents.toolset import NEWEST, load_toolset
from proctor.models.contract import ModelError, ModelFault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proctor.agents.conversation import Dropped
    from proctor.models.contract import ModelAnswer


class Options(BaseModel):
    """What `--agent tool-loop` takes."""

    model_config = ConfigDict(extra="forbid")
    toolset: str = NEWEST
    """Version of the prompts and tool definitions."""
    system_prompt: str | None = None
    """In place of the toolset's."""
    nudge: str | None = None
    """In place of the toolset's."""
    max_nudges: int = Field(default=3, ge=0)
    """Answers without a tool call, in a row, before the harness gives up for the model."""
    max_bad_replies: int = Field(default=3, ge=0)
    """Unusable replies of the endpoint, in a row, before the trial ends with MODEL_ERROR."""
    output_chars: int = Field(default=16_000, ge=200)
    """How much of one tool result the model sees."""
    context_tokens: int | None = Field(default=None, ge=1000)
    """How large a request may grow before the oldest results are dropped; None: until the endpoint refuses one."""
    parallel: Parallel = "reads"
    """Which calls of one answer run side by side."""
    ask_user: bool = False
    """Offer the tool `ask_user`, where the task has a simulated user."""
    user_model: str | None = None
    """Who plays a user that is a model: NAME@URL, a model file, or a model of the run's gateway."""


class ToolLoop:
    """OpenAI-style tool calling: ask, run the calls, hand back the results, until `finish` or a limit."""

    name = "tool-loop"
    version = "2"
    needs_model = True
    options_model = Options

    async def run(self, context: HarnessContext) -> AgentResult:
        """The loop. Limits are not its business: the model, room and recorder of the context raise them."""
        options = parse_options(Options, self.name, context.options)
        toolset = load_toolset(options.toolset)
        user = UserDesk.of(context, wanted=options.ask_user)
        tools = Toolbox(context.room, options.output_chars, user)
        definition = toolset.tools(context.limits.tool_call_s, with_user=user is not None)
        prompt = toolset.system_prompt if user is None else toolset.system_prompt_with_user
        facts = {"toolset": toolset.version, "toolset_digest": toolset.digest}
        opening = open_conversation(context, options.system_prompt or prompt, facts)
        conversation = Conversation(opening, definition)
        silent_turns = 0
        while True:
            answer = await ask_within(context, conversation, definition, options)
            calls = tool_calls(answer, turn=conversation.said)
            await act(context, tools, answered(answer, calls), options.parallel)
            if tools.finished is not None:
                return AgentResult(StopReason.FINISHED, final_message=tools.finished)

            conversation.add(exchange(answer, calls))
            silent_turns = 0 if calls else silent_turns + 1
            if silent_turns > options.max_nudges:
                detail = f"{silent_turns} answers in a row without a tool call"
                return AgentResult(StopReason.GAVE_UP, detail, final_message=answer.text)
            if silent_turns:
                nudge = options.nudge or toolset.nudge
                conversation.say({"role": "user", "content": nudge})
                context.recorder.step(said("user", nudge))


async def ask_within(
    context: HarnessContext, conversation: Conversation, tools: Sequence[Mapping[str, Any]], options: Options
) -> ModelAnswer:
    """One answer to a conversation that is kept within its budget. What is dropped becomes a step before the call.

    A request that the endpoint refuses as too long is halved and made again, as long as there is something to drop;
    after that the refusal stands (ModelError).
    """
    note(context, conversation.fit(options.context_tokens))
    while True:
        try:
            answer = await ask(context, conversation.messages, tools, max_bad_replies=options.max_bad_replies)
        except ModelError as error:
            if error.fault is not ModelFault.CONTEXT or (dropped := conversation.halve()) is None:
                raise
            note(context, dropped)
        else:
            conversation.counted(answer.usage.prompt_tokens)
            return answer


def note(context: HarnessContext, dropped: Dropped | None) -> None:
    """Record what was dropped, as a step of its own."""
    if dropped is not None:
        step = said("system", dropped.line())
        step.extra["context_dropped"] = dropped.as_json()
        context.recorder.step(step)


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
