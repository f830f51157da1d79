"""OpenHands: the raw list of events (`trajectory.json`), or a row of `output.jsonl` that holds one under `history`.

An action has `id`, `source`, `action`, `args`; an observation has `observation`, `content` and the `cause` it answers.
Actions that one answer of the model asked for share its id in `tool_call_metadata`, and become one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proctor.trajectories.draft import (
    Draft,
    DraftStep,
    Imported,
    cost_of,
    count_of,
    iso,
    mapping,
    openai_metrics,
    sums,
    text_of,
)

FORMAT = "openhands"
_NO_TOOL = frozenset({"message", "system", "recall", "change_agent_state", "null", "condensation"})
_NOT_ARGUMENTS = frozenset(
    {"thought", "hidden", "confirmation_state", "blocking", "is_input", "is_static", "security_risk"}
)
_SILENT = frozenset({"agent_state_changed", "null", "recall", "change_agent_state"})


def is_openhands(value: Any) -> bool:
    """True for what this module reads."""
    events = value.get("history") if isinstance(value, Mapping) else value
    if not isinstance(events, list) or not events:
        return False
    return all(isinstance(one, Mapping) and ("action" in one or "observation" in one) for one in events[:5]) and any(
        "source" in one for one in events[:5]
    )


def import_openhands(value: Any, *, file: str) -> Imported:
    """The trajectory. Raises ConfigError."""
    row: Mapping[str, Any] = value if isinstance(value, Mapping) else {"history": value}
    metadata = mapping(row.get("metadata"))
    settings = mapping(metadata.get("llm_config"))
    draft = Draft(
        FORMAT,
        agent=text_of(metadata.get("agent_class")) or "openhands",
        version=text_of(metadata.get("agent_version")) or "unknown",
        model=text_of(settings.get("model")) or None,
        session_id=text_of(row.get("instance_id")) or None,
    )
    _Reader(draft).read(row["history"])
    _facts(draft, row)
    return draft.finish(file=file)


class _Reader:
    """Puts events in their places; `_of` remembers which step and call an event became."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._of: dict[Any, tuple[DraftStep, str | None]] = {}
        self._by_response: dict[str, DraftStep] = {}
        self._metrics: Mapping[str, Any] = {}

    def read(self, events: list[Any]) -> None:
        for event in events:
            if not isinstance(event, Mapping):
                self._draft.losses.add("an event that is no object")
                continue
            self._metrics = mapping(event.get("llm_metrics")) or self._metrics
            if "observation" in event:
                self._observation(event)
            else:
                self._action(event)
        self._totals()

    def _action(self, event: Mapping[str, Any]) -> None:
        kind, args = text_of(event.get("action")), event.get("args") or {}
        args = args if isinstance(args, Mapping) else {"value": args}
        source, when = event.get("source"), iso(event.get("timestamp"))
        if kind == "system":
            self._draft.add("system", args.get("content"), timestamp=when)
            tools = args.get("tools")
            self._draft.tools = [dict(one) for one in tools if isinstance(one, Mapping)] if tools else None
        elif kind == "message" and source != "agent":
            step = self._draft.add("user", args.get("content") or event.get("message"), timestamp=when)
            if args.get("image_urls"):
                self._draft.losses.add("an image of a message")
            self._of[event.get("id")] = (step, None)
        elif kind in _SILENT or source == "environment":
            self._draft.losses.add(f"an action of kind {kind}, which is none of the agent's")
        else:
            self._agent(event, kind, args, when)

    def _agent(self, event: Mapping[str, Any], kind: str, args: Mapping[str, Any], when: str | None) -> None:
        call = mapping(event.get("tool_call_metadata"))
        response = mapping(call.get("model_response"))
        response_id = text_of(response.get("id"))
        step = self._by_response.get(response_id) if response_id else None
        if step is None:
            message = args.get("content") if kind == "message" else args.get("thought") or _said(response)
            model = text_of(response.get("model")) or self._draft.model
            step = self._draft.add("agent", message, timestamp=when, llm_calls=1, model_name=model)
            step.metrics = openai_metrics(response.get("usage"))
            if response_id:
                self._by_response[response_id] = step
                self._draft.losses.add("the provider's raw reply, beyond usage and model")
        call_id = None
        if kind not in _NO_TOOL:
            arguments = {
                name: value for name, value in args.items() if name not in _NOT_ARGUMENTS and value is not None
            }
            call_id = step.call(call.get("function_name") or kind, arguments, call.get("tool_call_id"), action=kind)
        self._of[event.get("id")] = (step, call_id)

    def _observation(self, event: Mapping[str, Any]) -> None:
        kind = text_of(event.get("observation"))
        cause = event.get("cause")
        place = self._of.get(cause) if isinstance(cause, (int, str)) else None
        if place is None:
            if kind in _SILENT:
                self._draft.losses.add(f"an observation of kind {kind}, which answers nothing")
                return
            step = self._draft.last_agent()
            if step is None:
                self._draft.losses.add(f"an observation of kind {kind} before the agent acted")
                return
            place = (step, None)
        extras = mapping(event.get("extras"))
        code = mapping(extras.get("metadata")).get("exit_code", extras.get("exit_code"))
        step, call_id = place
        step.result(event.get("content"), call_id, observation=kind, exit_code=code,
                    error="error" if kind == "error" else None)  # fmt: skip
        if extras.get("screenshot"):
            self._draft.losses.add("a screenshot")

    def _totals(self) -> None:
        usage = mapping(self._metrics.get("accumulated_token_usage"))
        self._draft.totals = sums(self._draft.steps)
        for name, value in (
            ("total_prompt_tokens", count_of(usage.get("prompt_tokens"))),
            ("total_completion_tokens", count_of(usage.get("completion_tokens"))),
            ("total_cached_tokens", count_of(usage.get("cache_read_tokens"))),
            ("total_cost_usd", cost_of(self._metrics.get("accumulated_cost"))),
        ):
            if value is not None:
                self._draft.totals[name] = value


def _said(response: Mapping[str, Any]) -> str:
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return text_of(mapping(mapping(first).get("message")).get("content"))


def _facts(draft: Draft, row: Mapping[str, Any]) -> None:
    kept = {name: row[name] for name in ("instance_id", "test_result", "error", "metrics") if row.get(name)}
    draft.extra |= kept
    for name in sorted(row.keys() - {"history", "metadata", *kept}):
        if row[name]:
            draft.losses.add(f"{name}: a field that is not known")
