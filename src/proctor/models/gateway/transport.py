"""The gateway for harnesses in this process: a transport for httpx that makes calls without a socket in between."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from proctor.models.gateway.dialects import OPERATIONS
from proctor.models.gateway.exchange import CutShort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.models.gateway.access import TrialAccess
    from proctor.models.gateway.exchange import Exchange
    from proctor.models.gateway.gateway import Gateway


class GatewayTransport(httpx.AsyncBaseTransport):
    """Sends the calls of one trial to its gateway, whatever host they name; the same path as over HTTP."""

    def __init__(self, gateway: Gateway, access: TrialAccess) -> None:
        self._gateway = gateway
        self._access = access

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One call. Raises httpx.ReadError when an answer breaks off, as a socket would."""
        path = urlsplit(str(request.url)).path
        operation = next((one for one in OPERATIONS.values() if path.endswith("/" + one.path)), None)
        if operation is None:
            return httpx.Response(404, json={"error": {"message": f"the gateway does not serve {path}"}})
        call = self._gateway.exchange(self._access, operation, await request.aread(), {}, trusted=True)
        await call.open()
        return httpx.Response(call.status, headers=call.headers, stream=_Stream(call))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, call: Exchange) -> None:
        self._call = call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._call.chunks():
                yield chunk
        except CutShort as error:
            raise httpx.ReadError(str(error)) from error

    async def aclose(self) -> None:
        """The reader is done, or has given up."""
        self._call.close()
