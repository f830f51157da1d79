"""The candidate's brain: clients that turn messages into answers and tell what they cost."""

from proctor.models.client import OpenAIChatClient
from proctor.models.contract import ModelAnswer, ModelClient, ModelError, ModelFault, ModelSpec, ModelToolCall, Usage
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
