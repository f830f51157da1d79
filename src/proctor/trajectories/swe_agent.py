"""SWE-agent: `.traj` files with `history` (what was said) and `trajectory` (what was done, with times)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from proctor.trajectories.draft import Draft, Imported, cost_of, count_of, mapping, text_of

FORMAT = "swe-agent"
_HISTORY = frozenset({"role", "content", "agent", "message_type", "thought", "action", "tool_calls", "tool_call_ids",
                      "is_demo", "thinking_blocks", "tags", "cache_control"})  # fmt: skip
_TURN = frozenset({"action", "observation", "response", "thought", "execution_time", "state", "query", "messages",
                   "extra_info"})  # fmt: skip


def is_swe_agent(value: Any) -> bool:
    """True for what this module reads."""
    if not isinstance(value, Mapping):
        return False
    for name, key in (("history", "role"), ("trajectory", "action")):
        items = value.get(name)
        if isinstance(items, list) and items and isinstance(items[0], Mapping) and key in items[0]:
            return True
    return False


def import_swe_agent(value: Mapping[str, Any], *, file: str) -> Imported:
    """The trajectory: from `history` where there is one, else from `trajectory`. Raises ConfigError."""
    info = mapping(value.get("info"))
    settings = _settings(value.get("replay_config"))
    model = mapping(mapping(settings.get("agent")).get("model"))
    draft = Draft(
        FORMAT,
        agent="swe-agent",
        version=text_of(info.get("swe_agent_version")) or "unknown",
        model=text_of(model.get("name")) or None,
        agent_extra={"config": settings} if settings else {},
    )
    turns = [one for one in value.get("trajectory") or () if isinstance(one, Mapping)]
    history = [one for one in value.get("history") or () if isinstance(one, Mapping)]
    if history:
        _from_history(draft, history, turns)
    else:
        _from_turns(draft, turns)
    _facts(draft, value, info)
    return draft.finish(file=file)


def _settings(value: Any) -> Mapping[str, Any]:
    """`replay_config`, which newer versions write as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return mapping(value)


def _from_history(draft: Draft, history: list[Mapping[str, Any]], turns: list[Mapping[str, Any]]) -> None:
    waiting = list(turns)
    for item in history:
        demo = True if item.get("is_demo") else None
        role = item.get("role")
        for name in sorted(item.keys() - _HISTORY):
            draft.losses.add(f"history[].{name}: a field that is not known")
        if role == "assistant":
            step = draft.add("agent", item.get("content"), llm_calls=1, copied=demo, model_name=draft.model,
                             reasoning=_thinking(item))  # fmt: skip
            if text_of(item.get("thought")) not in ("", step.message):
                step.extra["thought"] = text_of(item.get("thought"))
            for call in item.get("tool_calls") or ():
                function = call.get("function") if isinstance(call, Mapping) else None
                if isinstance(function, Mapping):
                    step.call(function.get("name"), function.get("arguments"), call.get("id"),
                              action=item.get("action"))  # fmt: skip
            if not step.calls and item.get("action"):
                step.call("bash", {"command": text_of(item["action"])})
            if waiting and not demo and _same(waiting[0].get("action"), item.get("action")):
                _timing(draft, step.extra, waiting.pop(0))
        elif (step_before := draft.last_agent()) is not None and item.get("message_type") == "observation":
            ids = [text_of(one) for one in item.get("tool_call_ids") or ()]
            known = [call.tool_call_id for call in step_before.calls]
            call_id = ids[0] if len(ids) == 1 else known[0] if len(known) == 1 else None
            step_before.result(item.get("content"), call_id)
        else:
            draft.add("system" if role == "system" else "user", item.get("content"), copied=demo)
    if waiting:
        draft.losses.add("a turn of `trajectory` that no message of `history` belongs to: its time", len(waiting))


def _same(one: Any, other: Any) -> bool:
    return text_of(one).strip() == text_of(other).strip()


def _thinking(item: Mapping[str, Any]) -> str | None:
    blocks = item.get("thinking_blocks")
    if not isinstance(blocks, list):
        return None
    return "\n".join(text_of(block.get("thinking")) for block in blocks if isinstance(block, Mapping)) or None


def _from_turns(draft: Draft, turns: list[Mapping[str, Any]]) -> None:
    draft.losses.add("the system prompt and the task: the file has no `history`")
    for turn in turns:
        step = draft.add("agent", turn.get("response") or turn.get("thought"), llm_calls=1, model_name=draft.model)
        if turn.get("action"):
            call_id = step.call("bash", {"command": text_of(turn["action"])})
            step.result(turn.get("observation"), call_id)
        _timing(draft, step.extra, turn)


def _timing(draft: Draft, extra: dict[str, Any], turn: Mapping[str, Any]) -> None:
    if turn.get("execution_time") is not None:
        extra["execution_time_s"] = turn["execution_time"]
    if turn.get("state"):
        extra["state"] = turn["state"]
    for name in ("query", "messages"):
        if turn.get(name):
            draft.losses.add(f"trajectory[].{name}: the whole prompt of each turn")
    for name in sorted(turn.keys() - _TURN):
        draft.losses.add(f"trajectory[].{name}: a field that is not known")


def _facts(draft: Draft, value: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    stats = mapping(info.get("model_stats"))
    draft.totals = {
        "total_prompt_tokens": count_of(stats.get("tokens_sent")),
        "total_completion_tokens": count_of(stats.get("tokens_received")),
        "total_cost_usd": cost_of(stats.get("instance_cost")),
    }
    draft.extra |= {"info": dict(info)} if info else {}
    draft.losses.add("times: the file has durations only")
    if not stats:
        draft.losses.add("tokens and cost: the file has none")
    for name in sorted(value.keys() - {"history", "trajectory", "info", "replay_config", "environment"}):
        draft.losses.add(f"{name}: a field that is not known")
    if value.get("environment"):
        draft.extra["environment"] = value["environment"]
