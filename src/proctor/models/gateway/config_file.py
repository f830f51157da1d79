"""Reading a gateway's TOML file. Everything in it is checked before anything is opened; every error names its field."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proctor.common import ConfigError
from proctor.models.gateway import config
from proctor.models.gateway.from_spec import check_key, key_from_environment
from proctor.models.gateway.prices import Price, PriceTable
from proctor.models.spec import checked_url

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SEE = "see docs/gateway.md"
_OWN_HEADERS = frozenset({"authorization", "x-api-key", "host", "content-length", "content-type", "transfer-encoding"})
_OWN_FIELDS = frozenset({"model", "messages", "input", "system", "stream", "stream_options", "tools"})

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


File = TypeVar("File", bound=_Table)


class _Circuit(_Table):
    failures: Count = config.Circuit().failures
    open_s: Seconds = config.Circuit().open_s


class _Health(_Table):
    path: Annotated[str, Field(pattern=r"^[!-~]+$")] = config.Health().path
    interval_s: Seconds = config.Health().interval_s
    timeout_s: Seconds = config.Health().timeout_s


class _Retries(_Table):
    max_retries: Annotated[int, Field(ge=0, le=100)] = config.Retries().max_retries
    base_s: Seconds = config.Retries().base_s
    cap_s: Seconds = config.Retries().cap_s
    max_retry_after_s: Annotated[float, Field(ge=0)] = config.Retries().max_retry_after_s


class _Timeouts(_Table):
    connect_s: Seconds = config.Timeouts().connect_s
    first_byte_s: Seconds | None = None
    idle_s: Seconds | None = None
    total_s: Seconds = config.Timeouts().total_s


class _Limits(_Table):
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    max_concurrent: Count | None = None


class _Upstream(_Table):
    base_url: str
    protocols: Annotated[list[config.Protocol], Field(min_length=1)]
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    api_key_file: str | None = None
    headers: dict[str, str] = {}
    limits: _Limits = _Limits()
    retries: _Retries = _Retries()
    timeouts: _Timeouts = _Timeouts()
    circuit: _Circuit = _Circuit()
    health: _Health | None = None


class _Sampling(_Table):
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    max_tokens: Count | None = None


class _Amounts(_Table):
    prompt: Dollars
    completion: Dollars
    cached: Dollars | None = None
    cache_write: Dollars | None = None


class _Price(_Amounts):
    model: Annotated[str, Field(min_length=1)]
    since: date


class _Model(_Table):
    upstream: str
    id: Annotated[str, Field(min_length=1)]
    aliases: list[str] = []
    returns: str | None = None
    fingerprint: str | None = None
    sampling: _Sampling = _Sampling()
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    extra_body: dict[str, Any] = {}
    provider_tools: list[str] = []
    prices: _Amounts | None = None
    limits: _Limits = _Limits()
    fallback: list[str] = []


class _Budgets(_Table):
    tokens: Count | None = None
    cost_usd: Annotated[float, Field(gt=0)] | None = None
    calls: Count | None = None


class _Scopes(_Table):
    run: _Budgets = _Budgets()
    trial: _Budgets = _Budgets()


class _File(_Table):
    """The file, version 1."""

    version: Literal[1]
    upstreams: Annotated[dict[str, _Upstream], Field(min_length=1)]
    models: Annotated[dict[str, _Model], Field(min_length=1)]
    prices: list[_Price] = []
    price_file: str | None = None
    budgets: _Scopes = _Scopes()
    max_parallel: Count = 32
    max_request_mb: Count = 32
    drain_s: Annotated[float, Field(ge=0)] = 30.0


class _PriceFile(_Table):
    version: Literal[1]
    prices: Annotated[list[_Price], Field(min_length=1)]


def load_gateway_config(path: Path) -> config.GatewayConfig:
    """The configuration in a TOML file; paths in it are taken from where it is. Raises ConfigError."""
    content = _toml(path)
    for name, table in _tables(content, "upstreams"):
        if "api_key" in table:
            raise ConfigError("a key must not be in this file", field=f"{path}: upstreams.{name}.api_key",
                              remedy="name its variable in api_key_env, or its file in api_key_file")  # fmt: skip
    file = _checked(_File, content, path)
    upstreams = {name: _upstream(name, one, path) for name, one in file.upstreams.items()}
    models = {name: _model(name, one, file, path) for name, one in file.models.items()}
    entries = list(file.prices)
    if file.price_file is not None:
        where = path.parent / file.price_file
        entries += _checked(_PriceFile, _toml(where), where).prices
    return config.GatewayConfig(
        upstreams=upstreams,
        models=models,
        prices=PriceTable(tuple(Price(**entry.model_dump()) for entry in entries)) if entries else None,
        run_budgets=config.Budgets(**file.budgets.run.model_dump()),
        trial_budgets=config.Budgets(**file.budgets.trial.model_dump()),
        max_parallel=file.max_parallel,
        max_request_bytes=file.max_request_mb << 20,
        drain_s=file.drain_s,
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path), remedy="check the path") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"not readable as TOML: {error}", field=str(path), remedy=_SEE) from error


def _tables(content: Mapping[str, Any], name: str) -> list[tuple[str, Mapping[str, Any]]]:
    tables = content.get(name)
    return [(key, one) for key, one in tables.items() if isinstance(one, dict)] if isinstance(tables, dict) else []


def _checked(kind: type[File], content: Mapping[str, Any], path: Path) -> File:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ConfigError("there is no such setting", field=f"{path}: {place}", remedy=_SEE) from error
        raise ConfigError(str(first["msg"]), field=f"{path}: {place}", remedy=_SEE) from error


def _upstream(name: str, file: _Upstream, path: Path) -> config.UpstreamConfig:
    where = f"{path}: upstreams.{name}"
    key, source = _key(file, where, path)
    for header, value in file.headers.items():
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", header) or not (value.isascii() and value.isprintable()):
            raise ConfigError("not an HTTP header", field=f"{where}.headers.{header}", remedy="name and value in ASCII")
        if header.lower() in _OWN_HEADERS:
            raise ConfigError("set by the gateway itself", field=f"{where}.headers.{header}",
                              remedy="a key belongs into api_key_env or api_key_file")  # fmt: skip
    return config.UpstreamConfig(
        name=name,
        base_url=checked_url(file.base_url, where),
        protocols=tuple(dict.fromkeys(file.protocols)),
        key=key,
        key_source=source,
        headers={header.lower(): value for header, value in file.headers.items()},
        limits=config.Limits(**file.limits.model_dump()),
        retries=config.Retries(**file.retries.model_dump()),
        timeouts=config.Timeouts(**file.timeouts.model_dump()),
        circuit=config.Circuit(**file.circuit.model_dump()),
        health=config.Health(**file.health.model_dump()) if file.health is not None else None,
    )


def _key(file: _Upstream, where: str, path: Path) -> tuple[str | None, str]:
    """The key and where it is from: a variable, or a file that holds nothing else."""
    if file.api_key_env is not None and file.api_key_file is not None:
        raise ConfigError("given beside api_key_env", field=f"{where}.api_key_file", remedy="keep one of the two")
    if file.api_key_env is not None:
        return key_from_environment(file.api_key_env, field=f"{where}.api_key_env"), f"${file.api_key_env}"
    if file.api_key_file is None:
        return None, ""
    field = f"{where}.api_key_file"
    try:
        key = (path.parent / file.api_key_file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot be read: {error}", field=field, remedy="check the path and its permissions"
        ) from error
    if not key:
        raise ConfigError("the file is empty", field=field, remedy="write the key into it")
    check_key(key, file.api_key_file, field=field)
    return key, file.api_key_file


def _model(name: str, file: _Model, whole: _File, path: Path) -> config.ModelConfig:
    where = f"{path}: models.{name}"
    if file.upstream not in whole.upstreams:
        raise ConfigError(f"there is no upstream {file.upstream!r}", field=f"{where}.upstream",
                          remedy=f"one of: {', '.join(whole.upstreams)}")  # fmt: skip
    protocols = set(whole.upstreams[file.upstream].protocols)
    if file.sampling.seed is not None and protocols - {"chat"}:
        raise ConfigError("a seed exists in the chat protocol alone, so it cannot be enforced",
                          field=f"{where}.sampling.seed",
                          remedy=f"leave it out, or give {file.upstream} protocols = [\"chat\"]")  # fmt: skip
    for other in file.fallback:
        if other not in whole.models or other == name:
            raise ConfigError(f"there is no other model {other!r}", field=f"{where}.fallback",
                              remedy=f"one of: {', '.join(one for one in whole.models if one != name)}")  # fmt: skip
    if clash := sorted(_OWN_FIELDS & file.extra_body.keys()):
        raise ConfigError(
            "set by the gateway or the agent", field=f"{where}.extra_body.{clash[0]}", remedy="leave it out"
        )
    prices = file.prices.model_dump(exclude_none=True) if file.prices is not None else None
    return config.ModelConfig(
        name=name,
        upstream=file.upstream,
        id=file.id,
        aliases=tuple(file.aliases),
        returns=file.returns,
        fingerprint=file.fingerprint,
        sampling=config.Sampling(**file.sampling.model_dump()),
        max_tokens_field=file.max_tokens_field,
        extra_body=file.extra_body,
        provider_tools=tuple(file.provider_tools),
        prices=prices,
        limits=config.Limits(**file.limits.model_dump()),
        fallback=tuple(file.fallback),
    )
