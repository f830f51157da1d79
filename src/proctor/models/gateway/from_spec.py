"""The gateway that `--model NAME@URL` and model files stand for: one model each, every parameter enforced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from proctor.common import ConfigError
from proctor.models.gateway.config import (
    Budgets,
    GatewayConfig,
    ModelConfig,
    Retries,
    Sampling,
    Timeouts,
    UpstreamConfig,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.models.contract import ModelSpec


def config_of(specs: Mapping[str, ModelSpec], *, run_budgets: Budgets | None = None) -> GatewayConfig:
    """The configuration for these models, by the names that trials are opened with.

    The key is read from the environment now. Raises ConfigError when a variable is missing or cannot be a key.
    """
    upstreams: dict[str, UpstreamConfig] = {}
    models: dict[str, ModelConfig] = {}
    for name, spec in specs.items():
        upstreams[name] = UpstreamConfig(
            name=name,
            base_url=spec.base_url,
            key=key_from_environment(spec.api_key_env),
            key_source=f"${spec.api_key_env}" if spec.api_key_env else "",
            retries=Retries(max_retries=spec.max_retries),
            timeouts=Timeouts(
                connect_s=spec.connect_timeout_s,
                first_byte_s=spec.first_token_timeout_s if spec.stream else None,
                total_s=spec.timeout_s,
            ),
        )
        models[name] = ModelConfig(
            name=name,
            upstream=name,
            id=spec.name,
            sampling=Sampling(spec.temperature, spec.top_p, spec.seed, spec.max_tokens),
            extra_body=spec.extra_body,
            prices=spec.prices,
        )
    return GatewayConfig(upstreams=upstreams, models=models, run_budgets=run_budgets or Budgets())


def key_from_environment(name: str | None, *, field: str = "api_key_env") -> str | None:
    """The key in an environment variable; None when no variable is named. Raises ConfigError."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {name} is not set", field=field, remedy="export the key")
    check_key(key, f"${name}", field=field)
    return key


def check_key(key: str, origin: str, *, field: str) -> None:
    """Raise ConfigError for what cannot be sent in a header."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{origin} holds characters that no key has", field=field, remedy="check what was exported")
