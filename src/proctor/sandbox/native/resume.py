"""What a guest that has outlived its host says of each command to the next one (docs/design/durable.md)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from proctor.sandbox.contract import GuestProtocolError
from proctor.sandbox.native.frames import REPORT, STDERR, STDOUT, WINDOW

_RESUME: Final = struct.Struct("<IIQQQQ")
_STARTED, _INPUT, _TERMINAL = 16, 32, 64
_KNOWN: Final = 0b1110 | _STARTED | _INPUT | _TERMINAL


@dataclass(frozen=True, slots=True)
class Resumption:
    """A command that runs, or whose end no host has taken note of."""

    subs: frozenset[int]
    started: bool
    input_open: bool
    terminal: bool
    stdin_window: int
    """Bytes of input that it takes now."""
    stdin_taken: int
    """Bytes of input that it has taken from all hosts together."""
    acknowledged: dict[int, int]
    """By sub-stream: bytes that hosts have acknowledged. Output is sent again from there."""


def parse(payload: bytes) -> Resumption:
    """A RESUME frame of a command. Raises GuestProtocolError for what cannot be true."""
    if len(payload) != _RESUME.size:
        raise GuestProtocolError(f"the guest sent {len(payload)} bytes about a command that goes on")
    facts, window, taken, *acknowledged = _RESUME.unpack(payload)
    if facts & ~_KNOWN or window > WINDOW or not facts & 1 << STDOUT:
        raise GuestProtocolError("the guest sent nonsense about a command that goes on")
    return Resumption(
        subs=frozenset(sub for sub in (STDOUT, STDERR, REPORT) if facts >> sub & 1),
        started=bool(facts & _STARTED),
        input_open=bool(facts & _INPUT),
        terminal=bool(facts & _TERMINAL),
        stdin_window=window,
        stdin_taken=taken,
        acknowledged=dict(zip((STDOUT, STDERR, REPORT), acknowledged, strict=True)),
    )
