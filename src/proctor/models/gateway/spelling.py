"""Keys that some servers read as others.

Servers written in Go match JSON keys without regard to case (and fold U+017F to `s`, U+212A to `k`); those that speak
protocol buffers read `maxTokens` as `max_tokens`. What is enforced here under one spelling would be asked for under
another. Keys that the agent is free to choose (arguments, schemas) mean nothing to a server and are not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES = (
    "api_base", "api_key", "background", "base_url", "best_of", "container", "content", "conversation",
    "custom_llm_provider", "environment", "extra_body", "fallbacks", "file", "file_id", "file_url", "audio_url",
    "image_url", "video_url", "functions", "input", "max_completion_tokens", "max_new_tokens", "max_output_tokens",
    "max_tokens", "mcp_servers", "messages", "mock_response", "model", "models", "n", "n_predict", "options", "output",
    "plugins", "previous_response_id", "prompt", "provider", "route", "seed", "source", "store", "stream",
    "stream_options", "system", "temperature", "tool_choice", "tools", "top_p", "type", "url", "user_profile_id",
    "web_search_options", "workspace_id",
)  # fmt: skip
"""What is enforced, counted or looked for."""
_WATCHED = {name.replace("_", ""): name for name in _NAMES}
_CONTAINERS = (dict, list)
_FREE = frozenset(
    {"arguments", "parameters", "input_schema", "schema", "json_schema", "metadata", "properties", "attributes"}
)


def folded(name: str) -> str:
    """The name that servers may take it for, without underscores."""
    return name.casefold().replace("_", "")


def other_spelling(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """A key of a request that is a watched one in another spelling, and that one; None when there is none."""
    rest: list[Any] = [values]
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest.extend(inner for inner in value if isinstance(inner, _CONTAINERS))
            continue
        together = "".join(value)
        if (together != together.lower() or not together.isascii()) and (found := _among(value)):
            return found
        for name, inner in value.items():
            # An `input` that is an object is what a tool is called with.
            if name not in _FREE and (isinstance(inner, list) or (isinstance(inner, dict) and name != "input")):
                rest.append(inner)
    return None


def _among(value: Mapping[str, Any]) -> tuple[str, str] | None:
    for name in value:
        if (name != name.lower() or not name.isascii()) and (watched := _WATCHED.get(folded(name))) is not None:
            return name, watched
    return None
