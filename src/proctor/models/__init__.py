"""The candidate's brain: clients that turn messages into answers and tell what they cost.

    client = OpenAIChatClient(load_model("name@http://127.0.0.1:8000/v1"))
    answer = await client.complete([{"role": "user", "content": "hello"}])

What is heavy is imported on first use. `proctor.models.scripted` is a model server for tests and demonstrations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.models.contract import ModelAnswer, ModelClient, ModelError, ModelFault, ModelSpec, ModelToolCall, Usage

if TYPE_CHECKING:
    from proctor.models.client import OpenAIChatClient
    from proctor.models.spec import load_model

__all__ = [
    "ModelAnswer",
    "ModelClient",
    "ModelError",
    "ModelFault",
    "ModelSpec",
    "ModelToolCall",
    "OpenAIChatClient",
    "Usage",
    "load_model",
]

_LAZY = {"OpenAIChatClient": "proctor.models.client", "load_model": "proctor.models.spec"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
