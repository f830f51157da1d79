"""`proctor run --gateway FILE`: the models that a gateway's file configures, as agents of a run have them."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, RefusedError
from proctor.models.contract import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proctor.agents.contract import Harness
    from proctor.models.gateway import GatewayConfig


def load_gateway(path: str | None) -> GatewayConfig | None:
    """The configuration in a file; None when no file is given. Raises ConfigError."""
    if path is None:
        return None
    from proctor.models.gateway import load_gateway_config

    return load_gateway_config(Path(path))


def gateway_models(config: GatewayConfig, names: Sequence[str]) -> list[ModelSpec]:
    """The models of these names (all that are configured, when none is given). Raises ConfigError."""
    for name in names:
        if name not in config.models:
            raise ConfigError(f"there is no model {name!r} in the gateway's file", field="--model",
                              remedy=f"one of: {', '.join(config.models)}")  # fmt: skip
    return [_spec(config, name) for name in names or config.models]


def check_protocols(config: GatewayConfig, harness: Harness, model: str) -> None:
    """Refuse an agent that runs in the sandbox and speaks nothing that the model's upstream does: better said now than
    after the images are built."""
    wanted = getattr(harness, "protocols", ())
    spoken = config.upstreams[config.models[model].upstream].protocols
    if wanted and not set(wanted) & set(spoken):
        raise RefusedError(
            f"{harness.name} speaks {' or '.join(wanted)}, and the upstream of {model} speaks {', '.join(spoken)}",
            field="--model",
            remedy="choose a model whose upstream does",
        )


def _spec(config: GatewayConfig, name: str) -> ModelSpec:
    """A model as the harness' client and the lock see it; what is enforced is enforced by the gateway."""
    model = config.models[name]
    upstream = config.upstreams[model.upstream]
    prices: Mapping[str, float] | None = model.prices
    if prices is None and config.prices is not None:
        found = config.prices.find(model.id, datetime.now(UTC).date())
        prices = found.amounts if found is not None else None
    sampling = model.sampling
    return ModelSpec(
        name=name,
        base_url=upstream.base_url,
        api_key_env=upstream.key_source[1:] if upstream.key_source.startswith("$") else None,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        timeout_s=upstream.timeouts.total_s,
        connect_timeout_s=upstream.timeouts.connect_s,
        max_retries=upstream.retries.max_retries,
        prices=prices,
        extra_body=model.extra_body,
    )


def locked(path: str | None, config: GatewayConfig | None) -> dict[str, Any]:
    """What the lock of a run keeps of its gateway, under `options`: the whole configuration, without a key."""
    if path is None or config is None:
        return {}
    return {"gateway": {"file": os.path.abspath(path), "digest": config.digest, "config": config.as_json()}}


def gateway_again(options: Mapping[str, Any]) -> tuple[str | None, GatewayConfig | None]:
    """The gateway of a run that was begun before. Raises ConfigError when its file says something else now."""
    kept = options.get("gateway")
    if kept is None:
        return None, None
    config = load_gateway(kept["file"])
    assert config is not None
    if config.digest != kept["digest"]:
        raise ConfigError("the gateway's file has changed since the run began", field=str(kept["file"]),
                          remedy="undo the change, or start a new run")  # fmt: skip
    return kept["file"], config
