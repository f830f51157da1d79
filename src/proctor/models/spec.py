"""Reading a model specification, as a person gives it: `name@base_url`, or a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proctor.common import ConfigError
from proctor.models.contract import ModelSpec

_OWN_FIELDS = frozenset({"model", "messages", "stream", "stream_options", "tools"})


class _Prices(BaseModel):
    """USD per million tokens."""

    model_config = ConfigDict(extra="forbid")
    prompt: float = Field(ge=0, allow_inf_nan=False)
    completion: float = Field(ge=0, allow_inf_nan=False)
    cached: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    cache_write: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class _ModelFile(BaseModel):
    """A model file: the fields of ModelSpec."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)
    base_url: str
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    temperature: float | None = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = 0
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool = True
    timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    connect_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    first_token_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_retries: int = Field(default=5, ge=0, le=100)
    prices: _Prices | None = None
    extra_body: dict[str, Any] = {}


def load_model(text: str) -> ModelSpec:
    """`name@base_url` (the last `@` before `http` divides), or the path of a TOML file.

    A key is never part of it: `api_key_env` names the environment variable. Raises ConfigError with the field.
    """
    name, found, address = text.rpartition("@http")
    if found:
        return _spec({"name": name, "base_url": "http" + address}, "--model")
    path = Path(text)
    if not path.is_file():
        raise ConfigError(
            f"{text!r} is neither name@http(s)://… nor a file", field="--model", remedy="see docs/agents.md"
        )
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"not readable as TOML: {error}", field=str(path)) from error
    return _spec(content, str(path))


def _spec(content: dict[str, Any], origin: str) -> ModelSpec:
    if "api_key" in content:
        remedy = "put it into an environment variable and name that in api_key_env"
        raise ConfigError("a key must not be in a file", field=f"{origin}: api_key", remedy=remedy)
    try:
        checked = _ModelFile.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(str(first["msg"]), field=f"{origin}: {name}", remedy="see docs/agents.md") from error
    if clash := _OWN_FIELDS & checked.extra_body.keys():
        raise ConfigError("set by Proctor itself", field=f"{origin}: extra_body.{min(clash)}")
    values = checked.model_dump()
    prices = values.pop("prices")
    if prices is not None:
        prices = {key: price for key, price in prices.items() if price is not None}
    base_url = checked_url(values.pop("base_url"), origin)
    return ModelSpec(**values, base_url=base_url, prices=prices)


def checked_url(url: str, origin: str) -> str:
    """The URL without a trailing slash. Raises ConfigError unless it is http(s) with a host and no credentials."""
    where = f"{origin}: base_url"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"not a URL: {error}", field=where) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError("not an http(s) URL with a host", field=where, remedy="like http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise ConfigError("credentials in a URL end up in records", field=where, remedy="use api_key_env")
    if parts.query or parts.fragment:
        raise ConfigError("a query or fragment has no place here", field=where)
    return url.rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Whether the endpoint is on this machine (such calls bypass any configured proxy)."""
    host = urlsplit(base_url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
