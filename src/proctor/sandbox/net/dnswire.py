"""DNS messages, as far as a sandbox needs them: one strict reader of queries and one writer of answers (RFC 1035).

A query is bytes from the candidate. Whatever is not one plain question is malformed: no compression (there is nothing
before the question to point to), no second question, no records but one EDNS OPT (RFC 6891), nothing after the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

QUERY_MAX = 512
_HEADER = struct.Struct("!6H")
_TYPES = struct.Struct("!2H")
_RD = 0x0100
_OPT_REPLY = b"\x00" + struct.pack("!HHIH", 41, 1232, 0, 0)


class Type(IntEnum):
    """The types that are told apart; every other number is just refused."""

    A = 1
    NS = 2
    CNAME = 5
    SOA = 6
    NULL = 10
    PTR = 12
    MX = 15
    TXT = 16
    AAAA = 28
    SRV = 33
    SVCB = 64
    HTTPS = 65
    ANY = 255


class Code(IntEnum):
    """Response codes."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    REFUSED = 5


class Malformed(ValueError):
    """Not a query that we answer. `id` is that of the message when it has one."""

    def __init__(self, message: str, query_id: int | None = None) -> None:
        super().__init__(message)
        self.id = query_id


@dataclass(frozen=True, slots=True)
class Query:
    """One question. `name` is as asked, labels joined by dots, bytes outside printable ASCII as `?`."""

    id: int
    name: str
    type: int
    question: bytes
    recursion_desired: bool
    edns: bool
    longest_label: int


def parse(data: bytes) -> Query:
    """Read a query. Raises Malformed."""
    if len(data) < _HEADER.size:
        raise Malformed("shorter than a header")
    query_id, flags, questions, answers, authorities, additionals = _HEADER.unpack_from(data)
    if len(data) > QUERY_MAX:
        raise Malformed(f"longer than {QUERY_MAX} bytes", query_id)
    if flags & ~(_RD | 0x0030):  # AD and CD are a resolver's business; all other bits must be clear in a query
        raise Malformed("not a standard query", query_id)
    if questions != 1 or answers or authorities or additionals > 1:
        raise Malformed("not exactly one question", query_id)
    labels, offset = _labels(data, query_id)
    if offset + 4 > len(data):
        raise Malformed("the question is cut off", query_id)
    kind, kind_class = _TYPES.unpack_from(data, offset)
    offset += 4
    question = data[_HEADER.size : offset]
    if kind_class != 1:
        raise Malformed("not of class IN", query_id)
    if additionals:
        offset = _skip_opt(data, offset, query_id)
    if offset != len(data):
        raise Malformed("bytes after the end", query_id)
    name = ".".join("".join(chr(c) if 33 <= c < 127 and c != 46 else "?" for c in label) for label in labels)
    longest = max((len(label) for label in labels), default=0)
    return Query(query_id, name, kind, question, bool(flags & _RD), bool(additionals), longest)


def _labels(data: bytes, query_id: int) -> tuple[list[bytes], int]:
    labels: list[bytes] = []
    offset = _HEADER.size
    while True:
        if offset >= len(data):
            raise Malformed("the name is cut off", query_id)
        length = data[offset]
        if length > 63:
            raise Malformed("a compressed or extended label", query_id)
        offset += 1
        if length == 0:
            break
        if offset + length > len(data):
            raise Malformed("the name is cut off", query_id)
        labels.append(data[offset : offset + length])
        offset += length
        if offset - _HEADER.size > 254:
            raise Malformed("the name is longer than 253 characters", query_id)
    return labels, offset


def _skip_opt(data: bytes, offset: int, query_id: int) -> int:
    """Step over one OPT record; what it says changes nothing here."""
    if offset + 11 > len(data) or data[offset] != 0 or struct.unpack_from("!H", data, offset + 1)[0] != 41:
        raise Malformed("an additional record that is not OPT", query_id)
    end: int = offset + 11 + struct.unpack_from("!H", data, offset + 9)[0]
    if end > len(data):
        raise Malformed("the OPT record is cut off", query_id)
    return end


def reply(query: Query, code: Code, address: str | None = None, ttl_s: int = 60) -> bytes:
    """The answer to `query`: an error, nothing, or one A record."""
    flags = 0x8080 | (_RD if query.recursion_desired else 0) | code
    header = _HEADER.pack(query.id, flags, 1, address is not None, 0, query.edns)
    record = b""
    if address is not None:
        octets = bytes(int(part) for part in address.split("."))
        record = b"\xc0\x0c" + struct.pack("!HHIH", Type.A, 1, ttl_s, 4) + octets
    return header + query.question + record + (_OPT_REPLY if query.edns else b"")


def reply_malformed(error: Malformed) -> bytes | None:
    """FORMERR for a message that at least had an id; None: say nothing."""
    return None if error.id is None else _HEADER.pack(error.id, 0x8080 | Code.FORMERR, 0, 0, 0, 0)
