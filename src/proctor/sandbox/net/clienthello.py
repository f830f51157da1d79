"""The name that a TLS client asks for, read from its ClientHello without ending the connection (RFC 8446, RFC 6066).

The message may be spread over any number of records and segments. It is bounded, every length is checked against the
one around it, and a client that hides the name (none, ECH, ESNI) is refused: what cannot be read cannot be checked.
"""

from __future__ import annotations

from dataclasses import dataclass

HELLO_MAX = 32 << 10
_RECORDS_MAX = 64
"""Clients use one or two. What arrives is read again from its beginning each time, so there must not be thousands."""
_RECORD_MAX = (1 << 14) + 256
_HANDSHAKE = 22
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_ALPN = 16
_ENCRYPTED = frozenset({0xFE0D, 0xFFCE, 0xFE0A, 0xFE09, 0xFE08})
"""ECH (RFC 9849), its drafts, and ESNI before it."""


class HelloError(ValueError):
    """Not a ClientHello that can be let through; the message is the reason that goes into the record."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What was asked for. `alpn`: the protocols that the client offers."""

    server_name: str
    alpn: tuple[bytes, ...]


def looks_like_tls(data: bytes) -> bool:
    """Whether a connection begins as TLS does."""
    return data[:2] == b"\x16\x03"[: len(data)]


def read(data: bytes) -> ClientHello | None:
    """The ClientHello at the beginning of a connection; None while it is not complete. Raises HelloError."""
    message = _handshake(data)
    return None if message is None else _hello(message)


def _handshake(data: bytes) -> bytes | None:
    """The first handshake message, put together from its records."""
    body = bytearray()
    offset = 0
    for _ in range(_RECORDS_MAX + 1):
        if len(body) >= 4:
            if body[0] != _CLIENT_HELLO:
                raise HelloError("tls-no-client-hello")
            length = int.from_bytes(body[1:4], "big")
            if length > HELLO_MAX:
                raise HelloError("tls-hello-too-long")
            if len(body) >= 4 + length:
                if len(body) > 4 + length:
                    raise HelloError("tls-malformed")  # a client has nothing more to say before the server speaks
                return bytes(body[4:])
        header = data[offset : offset + 5]
        if (len(header) >= 1 and header[0] != _HANDSHAKE) or (len(header) >= 2 and header[1] != 3):
            raise HelloError("tls-malformed")
        if len(header) < 5:
            return None
        length = int.from_bytes(header[3:5], "big")
        if not 0 < length <= _RECORD_MAX:
            raise HelloError("tls-malformed")
        fragment = data[offset + 5 : offset + 5 + length]
        body += fragment
        if len(body) > HELLO_MAX + 4:
            raise HelloError("tls-hello-too-long")
        if len(fragment) < length:
            if len(body) >= 4 and body[0] != _CLIENT_HELLO:
                raise HelloError("tls-no-client-hello")
            return None
        offset += 5 + length
    raise HelloError("tls-hello-too-long")


class _Reader:
    """Takes fields off the front; whatever does not fit is malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise HelloError("tls-malformed")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))

    @property
    def empty(self) -> bool:
        return self._at == len(self._data)


def _hello(message: bytes) -> ClientHello:
    reader = _Reader(message)
    reader.take(2 + 32)  # version and random
    if len(reader.vector(1)) > 32 or len(reader.vector(2)) < 2 or not reader.vector(1):
        raise HelloError("tls-malformed")  # session, cipher suites, compression
    extensions = _Reader(b"" if reader.empty else reader.vector(2))
    if not reader.empty:
        raise HelloError("tls-malformed")
    seen: set[int] = set()
    name: str | None = None
    alpn: tuple[bytes, ...] = ()
    while not extensions.empty:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in seen:
            raise HelloError("tls-malformed")
        seen.add(kind)
        if kind in _ENCRYPTED:
            raise HelloError("tls-encrypted-name")
        if kind == _SERVER_NAME:
            name = _server_name(content)
        elif kind == _ALPN:
            alpn = _protocols(content)
    if name is None:
        raise HelloError("tls-no-name")
    return ClientHello(name, alpn)


def _server_name(content: bytes) -> str:
    reader = _Reader(content)
    names = _Reader(reader.vector(2))
    if not reader.empty or names.number(1) != 0:
        raise HelloError("tls-malformed")
    name = names.vector(2)
    if not names.empty:  # two names: which one a server would take is anybody's guess
        raise HelloError("tls-malformed")
    try:
        return name.decode("ascii").lower()
    except UnicodeDecodeError:
        raise HelloError("tls-malformed") from None


def _protocols(content: bytes) -> tuple[bytes, ...]:
    reader = _Reader(content)
    entries = _Reader(reader.vector(2))
    if not reader.empty:
        raise HelloError("tls-malformed")
    protocols = []
    while not entries.empty:
        protocols.append(entries.vector(1))
    return tuple(protocols)


ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"
"""The alert that a refused client gets: fatal, access_denied."""
