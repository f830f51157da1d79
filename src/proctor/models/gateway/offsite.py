"""What a request asks the provider to do by itself: search, run code, fetch addresses, open stored files, remember.

All of it happens outside the sandbox and past its network policy, so it is taken out and reported, unless the run
allows it by type. Tools are let through by a list of types that the *agent* executes; a type that nobody here has heard
of is the provider's. Sources: the tool types and content blocks in the API references of OpenAI (chat completions,
responses) and Anthropic (messages).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from proctor.common.text import visible
from proctor.models.gateway.body import REMOVED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proctor.models.gateway.config import Protocol

_CLIENT_TOOLS: Mapping[str, tuple[str, ...]] = {
    "chat": ("function", "custom"),
    "responses": (
        "function", "custom", "local_shell", "apply_patch", "computer", "computer_use_preview", "namespace",
        "tool_search",
    ),
    "messages": (
        "custom", "bash_*", "text_editor_*", "computer_*", "memory_*", "tool_search_tool_*",
    ),
}  # fmt: skip
_TOP_LEVEL: Mapping[str, tuple[str, ...]] = {
    "chat": (
        "web_search_options", "plugins", "models", "fallbacks", "route", "provider", "mock_response", "extra_body",
        "api_base", "base_url", "api_key", "custom_llm_provider",
    ),
    "responses": ("conversation", "prompt", "background"),
    "messages": ("mcp_servers", "container", "workspace_id", "user_profile_id"),
}  # fmt: skip
"""Members that switch something on at the provider, name what it has stored, or (at routers) lead to another model."""

_CHOICES = frozenset({"auto", "any", "none", "required", "tool", "function", "custom", "allowed_tools"})
"""The kinds of `tool_choice` that name no kind of tool."""
_REMOTE_KEYS = ("file_id", "file_url")
_ADDRESSES = ("image_url", "video_url", "audio_url")
_NAME_MAX, _NAMES_MAX = 100, 100
"""How much of what was taken out is named: each becomes a finding, and the agent chooses the words."""
NOTICE = "[removed by the examiner: a file or address that only the model's provider could open]"


def strip(protocol: Protocol, values: Mapping[str, Any], allowed: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The edits that take out what is not allowed, and the names of what was taken out."""
    edits: dict[str, Any] = {}
    removed: list[str] = []
    for name in _TOP_LEVEL[protocol]:
        if values.get(name) not in (None, False) and not _fits(name, allowed):
            edits[name] = REMOVED
            removed.append(name)
    _strip_tools(protocol, values, allowed, edits, removed)
    for name in ("input",) if protocol == "responses" else ("messages", "system"):
        if isinstance(value := values.get(name), list) and not _fits("files", allowed):
            clean = _without_remote(value, removed)
            if clean is not value:
                edits[name] = clean
    few = [visible(" ".join(name[:_NAME_MAX].split())) for name in removed[:_NAMES_MAX]]
    if len(removed) > _NAMES_MAX:
        few.append(f"and {len(removed) - _NAMES_MAX} more")
    return edits, few


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tool_type(protocol: Protocol, tool: Any) -> str:
    """What kind of tool it is; a messages tool without a type is the client's own."""
    if not isinstance(tool, dict):
        return f"a JSON {type(tool).__name__}"
    kind = tool.get("type")
    if kind is None and protocol == "messages":
        return "custom"
    return str(kind)


def _is_local(protocol: Protocol, tool: Any, allowed: Sequence[str]) -> bool:
    kind = _tool_type(protocol, tool)
    if _fits(kind, allowed):
        return True
    if protocol == "responses" and kind == "shell":
        # The same type names the agent's own shell and a container at the provider.
        environment = tool.get("environment")
        return isinstance(environment, dict) and environment.get("type") == "local"
    if kind == "namespace" and isinstance(inner := tool.get("tools"), list):
        return all(_is_local(protocol, one, allowed) for one in inner)
    return _fits(kind, _CLIENT_TOOLS[protocol])


def _strip_tools(
    protocol: Protocol, values: Mapping[str, Any], allowed: Sequence[str], edits: dict[str, Any], removed: list[str]
) -> None:
    tools = values.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list):
        edits["tools"] = REMOVED
        removed.append(f"tools: a JSON {type(tools).__name__}")
        return
    kept = [tool for tool in tools if _is_local(protocol, tool, allowed)]
    if len(kept) == len(tools):
        return
    gone = [tool for tool in tools if not _is_local(protocol, tool, allowed)]
    removed.extend(_tool_type(protocol, tool) for tool in gone)
    edits["tools"] = kept or REMOVED
    choice = values.get("tool_choice")
    if choice is None:
        return
    if not kept:
        edits["tool_choice"] = REMOVED
        for name in ("parallel_tool_calls",):
            if name in values:
                edits[name] = REMOVED
    elif isinstance(choice, dict) and _names_one_of(choice, gone, kept):
        edits["tool_choice"] = {"type": "auto"} if protocol == "messages" else "auto"


def _names_one_of(choice: Mapping[str, Any], gone: Sequence[Any], kept: Sequence[Any]) -> bool:
    """Whether a forced choice (also one out of a list of allowed tools) names a tool that is gone, or a kind of tool
    that none of those kept is."""
    names = {str(tool.get("name")) for tool in gone if isinstance(tool, dict) and tool.get("name")}
    known = _CHOICES | {str(tool.get("type")) for tool in kept if isinstance(tool, dict)}
    inner = choice.get("tools")
    options = [choice, *(inner if isinstance(inner, list) else [])]
    return any(
        isinstance(one, dict) and (str(one.get("type")) not in known or str(one.get("name")) in names)
        for one in options
    )


def _without_remote(items: list[Any], removed: list[str]) -> list[Any]:
    """The items with every part that only the provider could open replaced by a notice; the same list if there is
    none."""
    changed: list[Any] | None = None
    for index, item in enumerate(items):
        clean = _clean(item, removed)
        if clean is not item:
            changed = changed if changed is not None else list(items)
            changed[index] = clean
    return items if changed is None else changed


def _clean(item: Any, removed: list[str]) -> Any:
    if not isinstance(item, dict):
        return item
    if kind := _remote(item):
        removed.append(kind)
        text_type = "input_text" if str(item.get("type", "")).startswith("input_") else "text"
        return {"type": text_type, "text": NOTICE}
    for name in ("content", "output", "source"):  # a document's source may be content again
        inner = item.get(name)
        if isinstance(inner, list):
            clean: Any = _without_remote(inner, removed)
        elif isinstance(inner, dict):
            clean = _clean(inner, removed)
        else:
            continue
        if clean is not inner:
            item = {**item, name: clean}
    return item


def _remote(part: Mapping[str, Any]) -> str | None:
    """What a content part makes the provider open by itself: a stored file, or an address."""
    kind = str(part.get("type"))
    if part.get("type") is None and "id" in part and not part.keys() & {"role", "content"}:
        return "item_reference"  # the type may be left out
    if any(part.get(key) for key in _REMOTE_KEYS) or kind in ("item_reference", "container_upload"):
        return f"{kind}: stored file" if kind != "item_reference" else kind
    if isinstance(file := part.get("file"), dict) and file.get("file_id"):
        return f"{kind}: stored file"
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") in ("url", "file"):
        return f"{kind}: {source['type']}"
    file_data = file.get("file_data") if isinstance(file, dict) else part.get("file_data")
    for address in (file_data, *(part.get(name) for name in _ADDRESSES)):
        if isinstance(address, dict):
            address = address.get("url")
        if isinstance(address, str) and _leads_away(address, bare=address is file_data):
            return f"{kind}: url"
    return None


def _leads_away(address: str, *, bare: bool) -> bool:
    """Whether something is fetched for `address`. Bare data (of a file) may stand without `data:`."""
    start = address.lstrip()[:64].lower()
    return "://" in start if bare else not start.startswith("data:")
