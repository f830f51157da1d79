"""mini-swe-agent: `.traj.json` of format 1 and 1.1 (`trajectory_format: mini-swe-agent-1…`), and lists of messages.

Messages are OpenAI-shaped. Before 1.1 a command is a fence in the text; since then it is a tool call, and
`extra.actions` has the commands. With the responses protocol a turn is an item with `object: response`, its results are
`function_call_output`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from proctor.trajectories.draft import Draft, DraftStep, Imported, cost_of, iso, mapping, openai_metrics, sums, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT = "mini-swe-agent"
_FENCE = re.compile(r"```(?:bash|sh|mswea_bash_command)[^\n]*\n(.*?)\n?```", re.S)
_CODE = re.compile(r"\s*<returncode>(-?\d+)</returncode>")
_MESSAGE_KEYS = frozenset({"role", "content", "extra", "tool_calls", "tool_call_id", "reasoning_content", "reasoning",
                           "type", "object", "output", "call_id", "name", "refusal"})  # fmt: skip
_INFO_KEYS = frozenset({"exit_status", "submission", "traceback", "model_stats", "mini_version", "config"})


def is_mini(value: Any) -> bool:
    """True for what this module reads."""
    if isinstance(value, Mapping):
        info = value.get("info")
        named = str(value.get("trajectory_format", "")).startswith(FORMAT)
        return isinstance(value.get("messages"), list) and (
            named or (isinstance(info, Mapping) and ("mini_version" in info or "exit_status" in info))
        )
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and "role" in one for one in value)


def import_mini(value: Any, *, file: str) -> Imported:
    """The trajectory. Raises ConfigError."""
    document: Mapping[str, Any] = value if isinstance(value, Mapping) else {"messages": value}
    info = mapping(document.get("info"))
    config = mapping(info.get("config"))
    model = mapping(config.get("model"))
    draft = Draft(
        FORMAT,
        agent=FORMAT,
        version=str(info.get("mini_version") or "unknown"),
        model=text_of(model.get("model_name")) or None,
        session_id=text_of(document.get("instance_id")) or None,
        agent_extra={"config": config} if config else {},
    )
    for message in document["messages"]:
        _message(draft, message)
    _facts(draft, document, info)
    return draft.finish(file=file)


def _facts(draft: Draft, document: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    stats = mapping(info.get("model_stats"))
    draft.totals = sums(draft.steps)
    if (cost := cost_of(stats.get("instance_cost"))) is not None:
        draft.totals["total_cost_usd"] = cost
    kept = {name: info[name] for name in ("exit_status", "submission", "traceback") if info.get(name)}
    if stats:
        kept["model_stats"] = stats
    draft.extra |= {**kept, "trajectory_format": document.get("trajectory_format", "(none)")}
    for name in sorted(document.keys() - {"info", "messages", "trajectory_format", "instance_id"}):
        draft.losses.add(f"{name}: a field that is not known")
    for name in sorted(info.keys() - _INFO_KEYS):
        draft.losses.add(f"info.{name}: a field that is not known")
    if not any(step.timestamp for step in draft.steps):
        draft.losses.add("times: the file has none")


def _message(draft: Draft, message: Any) -> None:
    if not isinstance(message, Mapping):
        draft.losses.add("a message that is no object")
        return
    extra = mapping(message.get("extra"))
    role = message.get("role")
    when = iso(extra.get("timestamp"))
    for name in sorted(message.keys() - _MESSAGE_KEYS):
        if message.get("object") != "response":
            draft.losses.add(f"messages[].{name}: a field that is not known")
    if message.get("object") == "response":
        _response(draft, message, extra)
    elif role == "assistant":
        _assistant(draft, message, extra)
    elif role == "tool" or message.get("type") == "function_call_output":
        call_id = message.get("tool_call_id") or message.get("call_id")
        _observed(draft, message.get("content") or message.get("output"), text_of(call_id) or None, extra)
    elif role == "exit":
        draft.add("system", message.get("content"), timestamp=when, extra={"exit": dict(extra)} if extra else {})
    elif role == "user" and (step := draft.last_agent()) is not None and step.calls and not step.results:
        _observed(draft, message.get("content"), step.calls[0].tool_call_id if len(step.calls) == 1 else None, extra)
    else:
        draft.add("system" if role in ("system", "developer") else "user", message.get("content"), timestamp=when)


def _assistant(draft: Draft, message: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    response = mapping(extra.get("response"))
    said = _choice(response)
    step = draft.add(
        "agent",
        message.get("content"),
        timestamp=iso(extra.get("timestamp")) or iso(response.get("created")),
        model_name=text_of(response.get("model")) or draft.model,
        reasoning=text_of(message.get("reasoning_content") or said.get("reasoning_content") or said.get("reasoning")),
        metrics=openai_metrics(response.get("usage"), extra.get("cost")),
        llm_calls=1,
    )
    if response:
        draft.losses.add("the provider's raw reply, beyond usage, model and reasoning")
    _calls(step, message.get("tool_calls") or said.get("tool_calls") or (), extra.get("actions") or ())
    if not step.calls:
        for command in _FENCE.findall(step.message):
            step.call("bash", {"command": command})


def _choice(response: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = response.get("choices")
    return mapping(mapping(choices[0]).get("message")) if isinstance(choices, list) and choices else {}


def _calls(step: DraftStep, calls: Sequence[Any], actions: Sequence[Any]) -> None:
    for call in calls:
        if isinstance(call, Mapping):
            function = mapping(call.get("function"))
            step.call(function.get("name"), function.get("arguments"), call.get("id"))
    if not step.calls:
        for action in actions:
            command = action.get("command") if isinstance(action, Mapping) else action
            step.call("bash", {"command": text_of(command)}, action.get("tool_call_id") if isinstance(action, Mapping)
                      else None)  # fmt: skip


def _response(draft: Draft, message: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """A turn of the responses protocol."""
    usage = mapping(message.get("usage"))
    step = draft.add("agent", timestamp=iso(extra.get("timestamp")) or iso(message.get("created_at")), llm_calls=1,
                     model_name=text_of(message.get("model")) or draft.model)  # fmt: skip
    step.metrics = openai_metrics(
        {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens"),
         "prompt_tokens_details": usage.get("input_tokens_details")}, extra.get("cost"))  # fmt: skip
    texts, thoughts = [], []
    for item in message.get("output") or ():
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "message":
            texts.append(text_of(item.get("content")))
        elif kind == "reasoning":
            thoughts.append(text_of(item.get("summary") or item.get("content")))
        elif kind == "function_call":
            step.call(item.get("name"), item.get("arguments"), item.get("call_id"))
        else:
            draft.losses.add(f"an output item of type {kind}")
    step.message, step.reasoning = "\n".join(texts), "\n".join(thoughts) or None
    draft.losses.add("the provider's raw reply, beyond usage, model and reasoning")


def _observed(draft: Draft, content: Any, call_id: str | None, extra: Mapping[str, Any]) -> None:
    step = draft.last_agent()
    text = text_of(content)
    code = extra.get("returncode")
    if code is None and (found := _CODE.match(text)):
        code = int(found[1])
    if step is None:
        draft.add("user", text)
        return
    step.result(text, call_id, exit_code=code)
    if extra.get("raw_output"):
        draft.losses.add("a command's raw output, beyond what the model was shown")
