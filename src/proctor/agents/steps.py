"""Making steps: what the built-in harnesses share when they report to the recorder."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from proctor.agents.contract import Step, ToolCall
from proctor.common import ConfigError
from proctor.models.contract import ModelError, ModelFault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proctor.agents.contract import HarnessContext
    from proctor.models.contract import ModelAnswer, ModelSpec

_Options = TypeVar("_Options", bound=BaseModel)


def timestamp() -> str:
    """Now, as ISO 8601 in UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def said(source: Literal["system", "user"], message: str) -> Step:
    """A step in which a person or the harness spoke."""
    return Step(source, message, timestamp())


def acted(message: str = "", calls: list[ToolCall] | None = None) -> Step:
    """An agent step without a model (`llm_calls` 0)."""
    return Step("agent", message, timestamp(), tool_calls=calls or [])


def answered(answer: ModelAnswer, calls: list[ToolCall]) -> Step:
    """An agent step made of one model answer; both model ids and the timing are kept."""
    extra: dict[str, Any] = {
        "requested_model": answer.requested_model,
        "finish_reason": answer.finish_reason,
        "latency_s": round(answer.latency_s, 6),
        "first_token_s": None if answer.first_token_s is None else round(answer.first_token_s, 6),
        "attempts": answer.attempts,
    }
    return Step(
        "agent",
        answer.text,
        timestamp(),
        model_name=answer.returned_model or answer.requested_model,
        reasoning=answer.reasoning,
        tool_calls=calls,
        usage=answer.usage,
        llm_calls=1,
        extra=extra,
    )


def unanswered(error: ModelError, spec: ModelSpec) -> Step:
    """An agent step whose model call gave nothing usable: the error and the start of the raw reply."""
    extra = {
        "requested_model": spec.name,
        "model_error": error.line(),
        "fault": str(error.fault),
        "attempts": error.attempts,
        "excerpt": error.excerpt,
    }
    return Step("agent", "", timestamp(), model_name=spec.name, llm_calls=error.attempts, extra=extra)


def open_conversation(
    context: HarnessContext, system_prompt: str, facts: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The first messages of a conversation, recorded; `facts` about the prompt go into the step."""
    opening = said("system", system_prompt)
    opening.extra.update(facts or {})
    context.recorder.step(opening)
    context.recorder.step(said("user", context.instruction))
    return [
        {"role": "system", "content": system_prompt},
        {"role": "user", "content": context.instruction},
    ]


async def ask(
    context: HarnessContext,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    max_bad_replies: int,
) -> ModelAnswer:
    """One usable answer. An unusable reply is recorded and asked for again, `max_bad_replies` times in a row.

    Raises ModelError when there is none, ConfigError when the harness was given no model.
    """
    if (model := context.model) is None:
        raise ConfigError("this harness needs a model", field="agent.model", remedy="give --model")
    bad_replies = 0
    while True:
        try:
            return await model.complete(messages, tools)
        except ModelError as error:
            context.recorder.step(unanswered(error, model.spec))
            bad_replies += 1
            if error.fault is not ModelFault.BAD_REPLY or bad_replies > max_bad_replies:
                raise


class NoOptions(BaseModel):
    """The options of a harness that takes none."""

    model_config = ConfigDict(extra="forbid")


def parse_options(model: type[_Options], harness: str, options: Mapping[str, Any]) -> _Options:
    """A harness' options as a checked value. Raises ConfigError that names the first wrong key."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(model.model_fields)
        raise ConfigError(
            str(first["msg"]), field=f"agent.options.{name}", remedy=f"{harness} takes: {known}"
        ) from error
