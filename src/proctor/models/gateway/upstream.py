"""One upstream: its connections, its key, how fast it may be asked, whether it is well. Tries once; others retry."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio

from proctor.models.contract import ModelFault
from proctor.models.gateway.limits import Breaker, Rate
from proctor.models.retry import is_retried, retry_after_s
from proctor.models.spec import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

    import aiohttp
    from yarl import URL

    from proctor.models.gateway.config import Limits, Protocol, UpstreamConfig

MAX_REPLY_BYTES = 64 << 20
"""A longer reply is refused: no answer has that size, and it has to fit into memory."""


class TryFailed(Exception):
    """A try that brought no answer. `status`, `headers` and `body` are the upstream's own words, if it had any."""

    def __init__(
        self,
        fault: ModelFault,
        message: str,
        *,
        retried: bool,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.fault, self.message, self.retried = fault, message, retried
        self.status, self.headers, self.body, self.wait_s = status, headers or {}, body, wait_s


class Gate:
    """The rate and the concurrency of an upstream or a model. Waiting is first come, first served."""

    def __init__(self, limits: Limits) -> None:
        self._rate = Rate(limits.requests_per_minute) if limits.requests_per_minute else None
        many = limits.max_concurrent
        self._slots = anyio.Semaphore(many, fast_acquire=True) if many else None

    async def enter(self, stack: ExitStack) -> None:
        """Take a place, which `stack` gives back."""
        if self._slots is not None:
            await self._slots.acquire()
            stack.callback(self._slots.release)
        if self._rate is not None and (wait_s := self._rate.reserve(anyio.current_time())):
            await anyio.sleep(wait_s)


@dataclass(slots=True)
class State:
    """How an upstream is, for the health page."""

    tries: int = 0
    failures: int = 0
    last_fault: str = ""
    probe: str = "never probed"
    probed_at: str | None = None
    in_flight: int = 0


@dataclass(slots=True)
class Opened:
    """A try whose answer has begun: status, headers, and the connection to read the rest from."""

    response: aiohttp.ClientResponse
    first: bytes
    began_at: float
    headers: dict[str, str] = field(default_factory=dict)


class Upstream:
    """The connections to one base URL. Opened and closed with the gateway."""

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self.gate = Gate(config.limits)
        self.breaker = Breaker(config.circuit)
        self.state = State()
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}

    async def open(self) -> None:
        """Make ready; nothing is sent."""
        import aiohttp

        timeouts = self.config.timeouts
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=20.0),
            timeout=aiohttp.ClientTimeout(
                total=timeouts.total_s, sock_connect=timeouts.connect_s, sock_read=timeouts.idle_s
            ),
            trust_env=not is_loopback(self.config.base_url),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
            read_bufsize=1 << 18,
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def headers(self, protocol: Protocol, passed: Mapping[str, str]) -> dict[str, str]:
        """The headers of a request: what passes of the client's, the upstream's own, and the key."""
        headers = {**passed, **self.config.headers, "accept-encoding": "identity", "content-type": "application/json"}
        if protocol == "messages":
            headers.setdefault("anthropic-version", "2023-06-01")
        if self.config.key is not None:
            if protocol == "messages":
                headers["x-api-key"] = self.config.key
            else:
                headers["authorization"] = f"Bearer {self.config.key}"
        return headers

    async def start(self, protocol: Protocol, path: str, headers: Mapping[str, str], body: bytes) -> Opened:
        """One try, up to the first bytes of a good answer. Raises TryFailed; the breaker is told either way."""
        self.state.tries += 1
        try:
            opened = await self._start(path, self.headers(protocol, headers), body)
        except TryFailed as failure:
            self.failed(failure)
            raise
        self.breaker.succeeded()
        return opened

    def failed(self, failure: TryFailed) -> None:
        """Count a failed try. A refusal is an answer: the upstream is well."""
        self.state.failures += 1
        self.state.last_fault = f"{failure.fault}: status {failure.status}" if failure.status else str(failure.fault)
        if failure.fault in (ModelFault.REFUSED, ModelFault.CONTEXT, ModelFault.BAD_REPLY) or failure.status == 429:
            self.breaker.succeeded()
        else:
            self.breaker.failed(anyio.current_time())

    async def _start(self, path: str, headers: Mapping[str, str], body: bytes) -> Opened:
        start = anyio.current_time()
        wait_s = self.config.timeouts.first_byte_s
        if wait_s is None:
            return await self._first_bytes(path, headers, body, start)
        with anyio.move_on_after(wait_s):
            return await self._first_bytes(path, headers, body, start)
        raise TryFailed(ModelFault.TIMEOUT, f"no first byte within {wait_s:g} s", retried=True)

    async def _first_bytes(self, path: str, headers: Mapping[str, str], body: bytes, start: float) -> Opened:
        assert self._session is not None, "the gateway is not open"
        with translated(self.config):
            response = await self._session.post(self._url(path), data=body, headers=headers, allow_redirects=False)
            try:
                if response.status != 200:
                    raise await self._refusal(response)
                first = await response.content.readany()
            except BaseException:
                response.close()
                raise
            return Opened(response, first, start, dict(response.headers))

    def _url(self, path: str) -> URL:
        """The address of an operation; each is read once."""
        if path not in self._urls:
            from yarl import URL

            self._urls[path] = URL(f"{self.config.base_url}/{path}")
        return self._urls[path]

    async def _refusal(self, response: aiohttp.ClientResponse) -> TryFailed:
        """A reply with a status other than 200, with its body kept as it is."""
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > MAX_REPLY_BYTES:
                break
        status = response.status
        retried = is_retried(status)
        return TryFailed(
            ModelFault.OVERLOADED if retried else ModelFault.REFUSED,
            f"status {status} from {self.config.base_url}",
            retried=retried,
            status=status,
            headers=dict(response.headers),
            body=bytes(content),
            wait_s=retry_after_s(response.headers.get("retry-after"), datetime.now(UTC)) if retried else None,
        )

    def enter(self) -> None:
        """A try begins."""
        self.state.in_flight += 1

    def leave(self) -> None:
        """It has ended."""
        self.state.in_flight -= 1

    async def watch(self) -> None:
        """Probe for as long as it is asked to; a failed probe counts like a failed try."""
        health = self.config.health
        if health is None:
            return
        while True:
            problem = await self._probe()
            self.state.probed_at = datetime.now(UTC).isoformat(timespec="seconds")
            self.state.probe = problem or "ok"
            if problem:
                self.breaker.failed(anyio.current_time())
            else:
                self.breaker.succeeded()
            await anyio.sleep(health.interval_s)

    async def _probe(self) -> str:
        assert self._session is not None
        health = self.config.health
        assert health is not None
        url = self.config.base_url + "/" + health.path
        if health.path.startswith("/"):
            scheme, _, rest = self.config.base_url.partition("://")
            url = f"{scheme}://{rest.partition('/')[0]}{health.path}"
        headers = self.headers(self.config.protocols[0], {})
        try:
            with anyio.fail_after(health.timeout_s), translated(self.config):
                async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                    return "" if response.status < 500 else f"status {response.status}"
        except TimeoutError:
            return f"no answer within {health.timeout_s:g} s"
        except TryFailed as failure:
            return failure.message

    def as_json(self) -> dict[str, Any]:
        """For the health page."""
        state = self.state
        return {
            "circuit": "open" if self.breaker.is_open(anyio.current_time()) else "closed",
            "opened": self.breaker.opened,
            "tries": state.tries,
            "failures": state.failures,
            "last_fault": state.last_fault,
            "probe": state.probe,
            "probed_at": state.probed_at,
            "in_flight": state.in_flight,
        }


class translated:
    """What the HTTP library raises, as TryFailed."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        import aiohttp

        if error is None or isinstance(error, TryFailed):
            return
        url, timeouts = self._config.base_url, self._config.timeouts
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            message = f"no connection to {url} within {timeouts.connect_s:g} s"
            raise TryFailed(ModelFault.UNREACHABLE, message, retried=True) from error
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ClientProxyConnectionError):
            raise TryFailed(ModelFault.UNREACHABLE, f"cannot reach {url}: {_reason(error)}", retried=True) from error
        if isinstance(error, aiohttp.SocketTimeoutError):
            message = f"nothing came for {timeouts.idle_s or 0:g} s"
            raise TryFailed(ModelFault.TIMEOUT, message, retried=True) from error
        if isinstance(error, TimeoutError):
            message = f"no whole answer within {timeouts.total_s:.1f} s"
            raise TryFailed(ModelFault.TIMEOUT, message, retried=True) from error
        if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
            raise TryFailed(ModelFault.CUT, f"the connection broke: {_reason(error)}", retried=True) from error
        if isinstance(error, aiohttp.ClientResponseError):
            raise TryFailed(ModelFault.BAD_REPLY, f"not an HTTP reply: {_reason(error)}", retried=False) from error
        if isinstance(error, aiohttp.ClientError | ValueError):
            raise TryFailed(
                ModelFault.REFUSED, f"the request cannot be sent: {_reason(error)}", retried=False
            ) from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
