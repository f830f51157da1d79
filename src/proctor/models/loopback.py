"""An ASGI application served on a random port of 127.0.0.1, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from anyio.abc import TaskStatus


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve `app`; gives `http://127.0.0.1:<port>`. Whoever is still being answered at the end is cut off."""
    # asyncio turns off Nagle's algorithm only for sockets that say they are TCP.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        failure: BaseException | None = None
        async with anyio.create_task_group() as group:
            await group.start(_serve, _server(app), listener)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            except Exception as error:  # kept out of the group, which would wrap it
                failure = error
            finally:
                group.cancel_scope.cancel()
        if failure is not None:
            raise failure


def _server(app: Any) -> Any:
    """A uvicorn server that leaves the process' signal handlers alone and tells when it is up."""
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

    config = uvicorn.Config(app, log_config=None, log_level="critical", lifespan="off", access_log=False)
    return Server(config)


async def _serve(
    server: Any, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    server.up = task_status.started
    try:
        await server.serve(sockets=[listener])
    finally:
        # The event loop must forget the sockets before they are closed.
        for answering in list(server.server_state.tasks):
            answering.cancel()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for listening in getattr(server, "servers", ()):
            listening.close()
