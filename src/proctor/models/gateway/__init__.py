"""The model gateway: every call of every harness passes here, whatever it speaks.

    config = load_gateway_config(Path("gateway.toml"))
    async with Gateway(config) as gateway:
        access = gateway.open_trial("t1", models=["name"], record=calls.append)

It holds the keys, pins model and sampling, meters, enforces budgets, tries again, and puts each call on record before
its answer ends. Requests and answers keep their own protocol, byte for byte but for what is enforced.
What is heavy is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.models.gateway.config import Budgets, GatewayConfig, ModelConfig, Sampling, UpstreamConfig

if TYPE_CHECKING:
    from proctor.models.gateway.access import Exceeded, Spent, TrialAccess
    from proctor.models.gateway.calls import CallRecord, Redactor, Try
    from proctor.models.gateway.config_file import load_gateway_config
    from proctor.models.gateway.from_spec import config_of
    from proctor.models.gateway.gateway import Gateway
    from proctor.models.gateway.prices import Price, PriceTable
    from proctor.models.gateway.transport import GatewayTransport

__all__ = [
    "Budgets",
    "CallRecord",
    "Exceeded",
    "Gateway",
    "GatewayConfig",
    "GatewayTransport",
    "ModelConfig",
    "Price",
    "PriceTable",
    "Redactor",
    "Sampling",
    "Spent",
    "TrialAccess",
    "Try",
    "UpstreamConfig",
    "config_of",
    "load_gateway_config",
]

_LAZY = {
    "CallRecord": "calls",
    "Exceeded": "access",
    "Gateway": "gateway",
    "GatewayTransport": "transport",
    "Price": "prices",
    "PriceTable": "prices",
    "Redactor": "calls",
    "Spent": "access",
    "TrialAccess": "access",
    "Try": "calls",
    "config_of": "from_spec",
    "load_gateway_config": "config_file",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
