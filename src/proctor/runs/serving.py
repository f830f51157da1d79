"""A gateway by itself: one access for whoever has the token, every call appended to a file."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import anyio

from proctor.common import ConfigError
from proctor.models.gateway import Gateway, load_gateway_config
from proctor.models.gateway.app import GatewayApp
from proctor.models.serving import serving
from proctor.runs.callfile import CallFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from proctor.models.gateway import GatewayConfig


def serve_gateway(
    path: Path,
    *,
    host: str,
    port: int,
    record: Path,
    models: Sequence[str] = (),
    token_file: Path | None = None,
    as_json: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError and InfraError."""
    config = load_gateway_config(path)
    calls = CallFile(record)
    if calls.recovered:
        print(
            f"{calls.recovered} calls had not ended when {record} was left; they are on record as cut off",
            file=sys.stderr,
        )
    try:
        anyio.run(_serve, config, host, port, calls, tuple(models), token_file, as_json)
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        calls.close()
        if token_file is not None:
            token_file.unlink(missing_ok=True)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _serve(
    config: GatewayConfig,
    host: str,
    port: int,
    calls: CallFile,
    models: Sequence[str],
    token_file: Path | None,
    as_json: bool,
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with Gateway(config) as gateway, serving(GatewayApp(gateway, details=True), host, port) as address:
            access = gateway.open_trial(
                "serve", models=list(models or config.models), record=calls.append, begun=calls.begun
            )
            shown = f"[{address[0]}]" if ":" in address[0] else address[0]
            url = f"http://{shown}:{address[1]}/v1"
            token = None if token_file is not None else access.token
            if token_file is not None:
                _write_secret(token_file, access.token)
            if as_json:
                print(
                    json.dumps({"base_url": url, "token": token, "models": [m.name for m in access.models]}), flush=True
                )
            else:
                print(f"gateway: {url}", f"token:   {token or token_file}", sep="\n", flush=True)
            _collect_rarely()
            async for _ in signals:
                break
            print("stopping: calls in flight are put on record", file=sys.stderr)
            access.close()


def _collect_rarely() -> None:
    """Calls leave hardly any cycles behind, so looking for them a tenth as often costs nothing but saves a part of
    every call."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _write_secret(path: Path, text: str) -> None:
    try:
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", field=f"--token-file {path}",
                          remedy="choose another file") from error  # fmt: skip
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
