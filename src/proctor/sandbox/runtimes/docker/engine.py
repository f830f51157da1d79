"""The Engine API over its Unix socket (version 1.41, Docker 20.10): requests, and a container's own streams."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any, Final

import anyio
import httpx

from proctor.common import InfraError, RefusedError
from proctor.sandbox.contract import LaunchError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable
    from pathlib import Path

API: Final = "/v1.41"
_DEFAULT = "unix:///var/run/docker.sock"
_TIMEOUT_S = 60.0
_ATTACH_S = 20.0
_HEAD_MAX = 16_384


def socket_path() -> str:
    """The engine's socket: `DOCKER_HOST`, or where it always is. Raises RefusedError for one on another machine."""
    host = os.environ.get("DOCKER_HOST") or _DEFAULT
    if not host.startswith("unix://"):
        raise RefusedError(
            f"DOCKER_HOST is {host}", field="runtime", remedy="the engine has to be on this machine: unix:///path"
        )
    return host.removeprefix("unix://")


class EngineError(InfraError):
    """The engine refused something; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class Engine:
    """One engine. Close it."""

    def __init__(self, path: str) -> None:
        self.path = path
        transport = httpx.AsyncHTTPTransport(uds=path, retries=0, limits=httpx.Limits(max_keepalive_connections=1))
        self._client = httpx.AsyncClient(transport=transport, base_url=f"http://engine{API}", timeout=_TIMEOUT_S)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        content: AsyncIterable[bytes] | None = None,
        query: dict[str, str] | None = None,
        fine: tuple[int, ...] = (),
    ) -> Any:
        """The JSON of an answer, or None. Raises EngineError but for the statuses in `fine`; they give None."""
        headers = {"Content-Type": "application/x-tar"} if content is not None else {}
        try:
            answer = await self._client.request(
                method, path, json=body, content=content, params=query or {}, headers=headers
            )
        except httpx.HTTPError as error:
            raise InfraError(f"the Docker engine at {self.path} does not answer: {error}") from error
        if answer.status_code in fine:
            return None
        if answer.status_code >= 400:
            raise EngineError(f"docker: {_message(answer)}", answer.status_code)
        return answer.json() if "json" in answer.headers.get("content-type", "") else None

    async def remove(self, container: str) -> None:
        """Remove a container, running or not. Gone is fine, and so is one that is being removed."""
        await self.call("DELETE", f"/containers/{container}", query={"force": "1", "v": "1"}, fine=(404, 409))

    async def attach(self, container: str) -> socket.socket:
        """A socket whose bytes are the container's standard input, and whose answers are its output in frames."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            with anyio.fail_after(_ATTACH_S):
                return await self._attach(sock, container)
        except BaseException as error:
            sock.close()
            if isinstance(error, (TimeoutError, OSError)):
                raise LaunchError(f"cannot attach to container {container}: {error}") from error
            raise

    async def _attach(self, sock: socket.socket, container: str) -> socket.socket:
        request = (
            f"POST {API}/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
            "Host: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        )
        sock.connect(self.path)  # a Unix socket: at once or not at all
        sock.send(request.encode())
        head = b""
        while b"\r\n\r\n" not in head:
            await anyio.wait_readable(sock)
            # Byte by byte: what follows the head is the container's own.
            more = sock.recv(1)
            if not more or len(head) > _HEAD_MAX:
                raise LaunchError(f"the Docker engine did not let us attach: {head[:200].decode(errors='replace')}")
            head += more
        if b" 101 " not in head.split(b"\r\n", 1)[0] and b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise LaunchError(f"the Docker engine did not let us attach: {head[:200].decode(errors='replace')}")
        return sock


def _message(answer: httpx.Response) -> str:
    try:
        return str(json.loads(answer.content)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"


async def file_chunks(path: Path, size: int = 1 << 20) -> AsyncIterable[bytes]:
    """The content of a file, piece by piece."""
    async with await anyio.open_file(path, "rb") as file:
        while chunk := await file.read(size):
            yield chunk
