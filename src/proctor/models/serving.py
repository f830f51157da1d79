"""Serving an ASGI application on a TCP port, as a part of this process: no signal handlers, no logs, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from proctor.common import InfraError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


@contextlib.asynccontextmanager
async def serving(app: Any, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[tuple[str, int]]:
    """Serve `app` while the body runs; gives the address that it listens on. Raises InfraError when it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's algorithm only for sockets that say they are TCP.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(2048)
        except (OSError, OverflowError) as error:
            raise InfraError(
                f"cannot listen on {host}:{port}: {error}", field="--host, --port", remedy="choose another"
            ) from error
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            await group.start(_serve, _server(app), listener)
            try:
                yield listener.getsockname()[:2]
            except Exception as error:  # carried out of the group, so that it is not wrapped in one
                failure = error
            finally:
                group.cancel_scope.cancel()
        if failure is not None:
            raise failure


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve `app` on a random port of 127.0.0.1; gives `http://127.0.0.1:<port>`."""
    async with serving(app) as (host, port):
        yield f"http://{host}:{port}"


def _server(app: Any) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        up: Callable[[], None] | None = None

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.up is not None:
                self.up()

    # An answer that breaks off upstream breaks off here, by an exception that would be logged as a traceback each time.
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        lifespan="off",
        access_log=False,
        http="httptools",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        backlog=2048,
    )
    return Server(config)


async def _serve(
    server: Any, listener: socket.socket, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    server.up = task_status.started
    try:
        await server.serve(sockets=[listener])
    finally:
        # Whoever is still being answered is cut off; the event loop must forget the sockets before they are closed.
        tasks = list(server.server_state.tasks)
        for answering in tasks:
            answering.cancel()
        if tasks:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks, timeout=5)
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for listening in getattr(server, "servers", ()):
            listening.close()
