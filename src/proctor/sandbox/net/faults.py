"""Faults on purpose: how an agent fares when the network is slow, breaks or answers 503. Seeded, and on record.

Which connection or request is hit is drawn from the seed, the name, the port and the ordinal of the connection or
request to that name, so a second run with the same seed and the same visits sees the same faults, whatever else
happens at the same time.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from proctor.common import ConfigError, digest_json
from proctor.sandbox.net import names
from proctor.sandbox.net.pipes import CHUNK, MeteredPipe, Pipe

FORMAT: Literal["proctor.faults/1"] = "proctor.faults/1"
Kind = Literal["delay", "bandwidth", "refuse", "reset", "stall", "status"]

_STALL_S = 3600.0

_Rate = Annotated[float, Field(ge=0, le=1)]


class _FaultDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Kind
    host: str = "*"
    port: int | None = Field(default=None, ge=1, le=65535)
    rate: _Rate = 1.0
    ms: float = Field(default=0, ge=0, le=600_000)
    jitter_ms: float = Field(default=0, ge=0, le=600_000)
    kb_per_s: float = Field(default=0, ge=0, le=1e7)
    after_bytes: int = Field(default=0, ge=0)
    status: Literal[429, 500, 502, 503, 504] = 503
    retry_after_s: int | None = Field(default=None, ge=0, le=86400)

    @field_validator("host")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        if (written := names.pattern(value)) is None:
            raise ValueError(f"{value!r} is neither a host name, nor `*.name.example`, nor `*`")
        return written

    @model_validator(mode="after")
    def _fits(self) -> _FaultDocument:
        needs = {"delay": self.ms + self.jitter_ms, "bandwidth": self.kb_per_s}.get(self.kind, 1)
        if not needs:
            raise ValueError("a delay needs `ms` or `jitter_ms`, a bandwidth `kb_per_s`, above zero")
        return self


class _ProfileDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal["proctor.faults/1"] = FORMAT
    name: str = Field(default="faults", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = 0
    faults: list[_FaultDocument] = Field(max_length=100)


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault, the host (exact, `*.suffix`, `*`) and port it is for, and how often it strikes (`rate`).

    `delay`: `ms` ± `jitter_ms` before a connection is made and before each HTTP request; `bandwidth`: `kb_per_s` to
    the sandbox; `refuse`: no connection; `reset` and `stall`: after `after_bytes` bytes to the sandbox; `status`: an
    HTTP error instead of the request, with `Retry-After: retry_after_s`.
    """

    kind: Kind
    host: str = "*"
    port: int | None = None
    rate: float = 1.0
    ms: float = 0
    jitter_ms: float = 0
    kb_per_s: float = 0
    after_bytes: int = 0
    status: int = 503
    retry_after_s: int | None = None

    def covers(self, name: str, port: int) -> bool:
        """Whether it is for connections to `name` at `port`."""
        return (self.port is None or self.port == port) and (self.host == "*" or names.matches(self.host, name))


@dataclass(frozen=True, slots=True)
class FaultProfile:
    """A named, seeded set of faults: a document, like a policy. `name` is the condition's name in a run's lock."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    name: str = "faults"

    def as_json(self) -> dict[str, Any]:
        """The document, with what is default left out."""
        default = Fault("delay")
        faults = [
            {"kind": fault.kind}
            | {
                key: getattr(fault, key)
                for key in Fault.__slots__
                if key != "kind" and getattr(fault, key) != getattr(default, key)
            }
            for fault in self.faults
        ]
        return {"format": FORMAT, "name": self.name, "seed": self.seed, "faults": faults}

    @classmethod
    def from_json(cls, document: Any, *, field: str = "faults") -> FaultProfile:
        """Read a document. Raises ConfigError that names the field."""
        try:
            parsed = _ProfileDocument.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise ConfigError(message, field=f"{field}{where}", remedy="see docs/network.md") from error
        return cls(tuple(Fault(**entry.model_dump()) for entry in parsed.faults), parsed.seed, parsed.name)

    @classmethod
    def parse(cls, text: str | bytes, *, field: str = "faults") -> FaultProfile:
        """Read a document from its JSON text."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"is no JSON: {error}", field=field) from error
        return cls.from_json(document, field=field)

    @property
    def digest(self) -> str:
        """Digest of the document."""
        return digest_json(self.as_json())

    def answers(self, name: str, port: int) -> bool:
        """Whether HTTP errors may be answered for `name`, so that its requests must be read."""
        return any(fault.kind == "status" and fault.covers(name, port) for fault in self.faults)


@dataclass(frozen=True, slots=True)
class ConnectionFaults:
    """What one connection suffers."""

    refuse: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    reset_after: int | None = None
    stall_after: int | None = None

    @property
    def text(self) -> str:
        """For the record."""
        parts = [
            "refuse" if self.refuse else "",
            f"delay {self.delay_s * 1000:.0f} ms" if self.delay_s else "",
            f"bandwidth {self.bytes_per_s / 1000:g} kB/s" if self.bytes_per_s else "",
            f"reset after {self.reset_after}" if self.reset_after is not None else "",
            f"stall after {self.stall_after}" if self.stall_after is not None else "",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class RequestFaults:
    """What one request suffers."""

    delay_s: float = 0.0
    status: int | None = None
    retry_after_s: int | None = None

    @property
    def text(self) -> str:
        """For the record."""
        delay = f"delay {self.delay_s * 1000:.0f} ms" if self.delay_s else ""
        return ", ".join(part for part in (delay, f"status {self.status}" if self.status else "") if part)


@dataclass(slots=True)
class FaultPlayer:
    """Draws what each connection and request of one sandbox suffers. Kept over reset and fork starts a new one."""

    profile: FaultProfile
    _ordinals: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def connection(self, name: str, port: int) -> ConnectionFaults:
        """For the next connection to `name`."""
        struck = self._draw("connection", name, port)
        delay_s, rate, reset, stall = 0.0, None, None, None
        for fault, dice in struck:
            match fault.kind:
                case "delay":
                    delay_s += _delay(fault, dice)
                case "bandwidth":
                    rate = min(rate or float("inf"), fault.kb_per_s * 1000)
                case "reset":
                    reset = min(fault.after_bytes, reset if reset is not None else fault.after_bytes)
                case "stall":
                    stall = min(fault.after_bytes, stall if stall is not None else fault.after_bytes)
        return ConnectionFaults(any(fault.kind == "refuse" for fault, _ in struck), delay_s, rate, reset, stall)

    def request(self, name: str, port: int) -> RequestFaults:
        """For the next HTTP request to `name`."""
        struck = self._draw("request", name, port)
        delay_s = sum(_delay(fault, dice) for fault, dice in struck if fault.kind == "delay")
        for fault, _ in struck:
            if fault.kind == "status":
                return RequestFaults(delay_s, fault.status, fault.retry_after_s)
        return RequestFaults(delay_s)

    def _draw(self, what: str, name: str, port: int) -> list[tuple[Fault, random.Random]]:
        ordinal = self._ordinals[what, name, port]
        self._ordinals[what, name, port] += 1
        struck = []
        for index, fault in enumerate(self.profile.faults):
            if fault.covers(name, port):
                dice = random.Random(f"{self.profile.seed}:{index}:{what}:{name}:{port}:{ordinal}")
                if dice.random() < fault.rate:
                    struck.append((fault, dice))
        return struck


def _delay(fault: Fault, dice: random.Random) -> float:
    return max(fault.ms + dice.uniform(-fault.jitter_ms, fault.jitter_ms), 0) / 1000


class FaultyPipe(MeteredPipe):
    """The sandbox's end of a connection that suffers `faults`."""

    def __init__(self, pipe: Pipe, faults: ConnectionFaults) -> None:
        super().__init__(pipe)
        self._faults = faults
        self._ended = anyio.Event()

    async def receive(self, max_bytes: int = CHUNK) -> bytes:
        """Pass on; remember the end, which ends a stall."""
        try:
            data = await super().receive(max_bytes)
        except OSError:
            self._ended.set()
            raise
        if not data:
            self._ended.set()
        return data

    async def send(self, data: bytes | memoryview) -> None:
        """Slowly, and not beyond what the faults let through."""
        view = memoryview(data)
        faults = self._faults
        while view:
            count = len(view)
            for limit in (faults.reset_after, faults.stall_after):
                if limit is not None:
                    count = min(count, max(limit - self.sent, 0))
            if faults.bytes_per_s is not None:
                count = min(count, max(int(faults.bytes_per_s / 20), 1))
            if count == 0:
                await self._strike()
            await super().send(view[: min(count, CHUNK)])
            view = view[min(count, CHUNK) :]
            if faults.bytes_per_s is not None:
                await anyio.sleep(count / faults.bytes_per_s)
        if faults.reset_after is not None and self.sent >= faults.reset_after:
            await self._strike()

    async def _strike(self) -> None:
        faults = self._faults
        if faults.reset_after is not None and self.sent >= faults.reset_after:
            self.reset()
            raise ConnectionResetError("reset on purpose")
        # Stalled: nothing more comes, and nobody says so, until the program gives up or the connection is cut.
        with anyio.move_on_after(_STALL_S):
            await self._ended.wait()
        self.reset()
        raise ConnectionResetError("stalled on purpose")
