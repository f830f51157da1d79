"""`proctor serve`: the parts of Proctor that also run alone."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def serve() -> None:
    """Serve a part of Proctor by itself: `gateway`."""


@serve.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8700, show_default=True, help="0: any that is free.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Append every call to this JSONL file, before its answer ends. Default: calls.jsonl.",
    default=Path("calls.jsonl"),
)
@click.option(
    "--model", "models", multiple=True, metavar="NAME", help="Only these models of the file. Default: all of them."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the token there (mode 600) instead of printing it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print where it listens, and the token, as one line of JSON.")
def gateway(
    config: Path,
    host: str,
    port: int,
    record: Path,
    models: tuple[str, ...],
    token_file: Path | None,
    as_json: bool,
) -> None:
    """A model gateway of its own, from a TOML file (docs/gateway.md).

    Speaks /v1/chat/completions, /v1/responses, /v1/messages, /v1/models and /healthz. Callers need the token that it
    prints when it is up; the keys of the upstreams stay here. Ends on Ctrl-C: calls in flight are put on record first.

    \b
    proctor serve gateway gateway.toml --port 8700 --record calls.jsonl

    Exit codes: 0 stopped, 4 the file is wrong, 6 it cannot listen or write.
    """
    from proctor.runs.serving import serve_gateway

    serve_gateway(config, host=host, port=port, record=record, models=models, token_file=token_file, as_json=as_json)
