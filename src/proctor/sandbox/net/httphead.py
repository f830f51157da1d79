"""Heads of HTTP/1.x messages, read strictly and written anew (RFC 9112).

Two readers that disagree about one message are how requests are smuggled. So what is let through is not what came in
but what was understood, written again: one spelling, one length. Whatever has two readings is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from proctor.sandbox.net import names

HEAD_MAX = 64 << 10
FIELDS_MAX = 200
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e\x80-\xff]{1,16384}) HTTP/1\.([01])")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_DIGITS = re.compile(rb"[0-9]{1,15}")
_HOST = re.compile(rb"([A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_METHOD_START = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}(?: |$)")
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade"})
_OVERRIDES = frozenset(
    {
        b"x-http-method",
        b"x-http-method-override",
        b"x-method-override",
        b"x-original-url",
        b"x-rewrite-url",
        b"x-forwarded-path",
        b"x-forwarded-prefix",
        b"x-forwarded-uri",
    }
)
"""Fields by which some servers take another method or path than those of the request line."""

Fields = tuple[tuple[bytes, bytes], ...]


class HeadError(ValueError):
    """A head that cannot be let through; the message is the reason that goes into the record."""


@dataclass(frozen=True, slots=True)
class Head:
    """What requests and responses have in common. `length` is that of the body; None when it is chunked, or (in a
    response) ends with the connection."""

    fields: Fields
    minor: int
    chunked: bool
    length: int | None

    def values(self, name: bytes) -> list[bytes]:
        """All values of a field, `name` in lower case."""
        return [value for field, value in self.fields if field.lower() == name]

    def tokens(self, name: bytes) -> list[bytes]:
        """The comma-separated words of a field, in lower case."""
        return [word.strip().lower() for value in self.values(name) for word in value.split(b",") if word.strip()]

    @property
    def closes(self) -> bool:
        """Whether the sender ends the connection after this message."""
        words = self.tokens(b"connection")
        return b"close" in words or (self.minor == 0 and b"keep-alive" not in words)


@dataclass(frozen=True, slots=True)
class Request(Head):
    """A request in origin-form. `target` is the path with its query."""

    method: str
    target: bytes

    @property
    def path(self) -> str:
        """The path without the query, for the record."""
        return self.target.partition(b"?")[0].decode("latin-1")

    @property
    def overrides(self) -> bool:
        """Whether a field may make a server take another method or path."""
        return any(name.lower().replace(b"_", b"-") in _OVERRIDES for name, _ in self.fields)

    @property
    def wants_websocket(self) -> bool:
        """Whether the connection is to become a WebSocket."""
        return b"upgrade" in self.tokens(b"connection") and self.tokens(b"upgrade") == [b"websocket"]

    def without(self, *drop: bytes) -> Request:
        """Without some fields (in lower case)."""
        return replace(self, fields=tuple((name, value) for name, value in self.fields if name.lower() not in drop))

    def encode(self) -> bytes:
        """The head as it is sent on."""
        line = b"%s %s HTTP/1.%d\r\n" % (self.method.encode(), self.target, self.minor)
        return line + _encode(self.fields)


@dataclass(frozen=True, slots=True)
class Response(Head):
    """A response; its head is sent on as it came, unless changed."""

    status: int
    line: bytes

    def encode(self) -> bytes:
        """The head as it is sent on."""
        return self.line + b"\r\n" + _encode(self.fields)


def may_be_http(data: bytes) -> bool:
    """Whether a connection that begins with `data` may still be HTTP/1."""
    return _METHOD_START.match(data) is not None


def end_of(data: bytes | bytearray, seen: int = 0) -> int | None:
    """Where the head at the front of `data` ends; None while it does not. Raises HeadError when it is too long.

    In the first `seen` bytes no end was found before: a head that comes byte by byte is not searched byte by byte."""
    end = data.find(b"\r\n\r\n", max(0, seen - 3), HEAD_MAX)
    if end >= 0:
        return end + 4
    if len(data) >= HEAD_MAX:
        raise HeadError("http-head-too-long")
    return None


def request(head: bytes, name: str, port: int) -> Request:
    """Read a request's head, up to and with its empty line, that was sent to `name` at `port`. Raises HeadError."""
    if head.startswith(b"PRI "):
        raise HeadError("http2-prior-knowledge")
    line, _, rest = head.partition(b"\r\n")
    match = _REQUEST.fullmatch(line)
    if match is None:
        raise HeadError("http-request-line")
    method, target, minor = match[1].decode("ascii"), match[2], int(match[3])
    if method.upper() == "CONNECT":
        raise HeadError("http-connect")
    if not target.startswith(b"/"):
        raise HeadError("http-asterisk" if target == b"*" else "http-absolute-form")
    if b"#" in target:
        raise HeadError("http-request-line")
    fields = _fields(rest)
    hosts = [value for field, value in fields if field.lower() == b"host"]
    if len(hosts) != 1:
        raise HeadError("http-no-host" if not hosts else "http-two-hosts")
    _check_host(hosts[0], name, port)
    chunked, length = _framing(fields, minor)
    return Request(fields, minor, chunked, 0 if length is None and not chunked else length, method, target)


def response(head: bytes, method: str) -> Response:
    """Read a response's head to a request with `method`. Raises HeadError."""
    line, _, rest = head.partition(b"\r\n")
    match = _STATUS.fullmatch(line)
    if match is None:
        raise HeadError("http-status-line")
    minor, status = int(match[1]), int(match[2])
    fields = _fields(rest)
    chunked, length = _framing(fields, 1)
    if method == "HEAD" or status < 200 or status in (204, 304):
        chunked, length = False, 0
    return Response(fields, minor, chunked, length, status, line)


def _fields(rest: bytes) -> Fields:
    """The field lines, up to the empty line."""
    lines = rest.split(b"\r\n")[:-2]
    if len(lines) > FIELDS_MAX:
        raise HeadError("http-too-many-fields")
    fields = []
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            raise HeadError("http-folded-field")
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise HeadError("http-malformed-field")
        if b"_" in name and name.lower().replace(b"_", b"-") in _FRAMING:
            raise HeadError("http-malformed-field")  # the same field to a server behind CGI's rules
        fields.append((name, value))
    return tuple(fields)


def _framing(fields: Fields, minor: int) -> tuple[bool, int | None]:
    """Whether the body is chunked, and its length if it has one: exactly one of them, said once."""
    lengths = [value for name, value in fields if name.lower() == b"content-length"]
    codings = [value for name, value in fields if name.lower() == b"transfer-encoding"]
    if codings:
        if lengths or minor == 0 or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise HeadError("http-ambiguous-length")
        return True, None
    if not lengths:
        return False, None
    if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
        raise HeadError("http-ambiguous-length")
    return False, int(lengths[0])


def _check_host(value: bytes, name: str, port: int) -> None:
    match = _HOST.fullmatch(value)
    if match is None or names.normal(match[1].decode("ascii")) != name:
        raise HeadError("http-other-host")
    if match[2] is not None and int(match[2]) != port:
        raise HeadError("http-other-port")


def _encode(fields: Fields) -> bytes:
    return b"".join(b"%s: %s\r\n" % field for field in fields) + b"\r\n"
