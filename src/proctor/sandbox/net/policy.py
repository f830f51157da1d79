"""The network policy of a sandbox: one frozen document, replaced as a whole, deny by default.

`none` reaches nothing (and still has the services that the host registers); `allow` reaches what a rule names; `open`
shares the machine's network, has to be asked for by that word, and marks the receipt. A rule that names `*` reaches
every public name: the receipt then says `public`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from proctor.common import ConfigError, digest_json
from proctor.sandbox.net import names

FORMAT: Literal["proctor.network-policy/1"] = "proctor.network-policy/1"
WEB_PORTS = (80, 443)
RULES_MAX = 1000
Mode = Literal["none", "allow", "open"]
Protocol = Literal["web", "tcp"]

_Method = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_-]{0,31}$")]
_Prefix = Annotated[str, StringConstraints(pattern=r"^/[!-\[\]-~]*$", max_length=1024)]


class _RuleDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    host: str = Field(max_length=255)
    ports: list[Annotated[int, Field(ge=1, le=65535)]] = Field(default=list(WEB_PORTS), min_length=1, max_length=64)
    methods: list[_Method] | None = Field(default=None, min_length=1, max_length=32)
    paths: list[_Prefix] | None = Field(default=None, min_length=1, max_length=256)
    protocol: Protocol = "web"
    internal: bool = False
    target: str | None = Field(default=None, max_length=300)

    @field_validator("host")
    @classmethod
    def _is_pattern(cls, value: str) -> str:
        if (written := names.pattern(value)) is None:
            raise ValueError(f"{value!r} is neither a host name, nor `*.name.example`, nor `*`")
        return written

    @model_validator(mode="after")
    def _fits(self) -> _RuleDocument:
        if self.protocol == "tcp" and (self.methods or self.paths):
            raise ValueError("`methods` and `paths` need protocol `web`: other protocols are carried unread")
        if self.internal and self.host == "*":
            raise ValueError("`*` cannot be internal: name the services of your own network one by one")
        if self.target is not None:
            if not self.internal:
                raise ValueError("`target` is for internal services: set `internal` too")
            _split_target(self.target)
        return self


class _PolicyDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal["proctor.network-policy/1"] = FORMAT
    mode: Mode = "none"
    rules: list[_RuleDocument] = Field(default=[], max_length=RULES_MAX)
    trust: str | None = Field(default=None, max_length=1 << 20)

    @model_validator(mode="after")
    def _fits(self) -> _PolicyDocument:
        if self.rules and self.mode != "allow":
            raise ValueError(f"rules go with mode `allow`, not `{self.mode}`")
        if self.trust is not None and "-----BEGIN CERTIFICATE-----" not in self.trust:
            raise ValueError("`trust` holds certificates in PEM form")
        if self.trust is not None and not self.trust.isascii():
            raise ValueError("`trust` is not ASCII")
        return self


@dataclass(frozen=True, slots=True)
class Rule:
    """What may be reached: a host (exact, `*.suffix` or `*`), its ports and, for HTTP, methods and path prefixes.

    `protocol` `web` is HTTP and TLS, which are read and checked; `tcp` carries anything unread. `internal` exempts
    the name from the rule that only public addresses are dialled; `target` (`address:port`) says where an internal
    name is, when no resolver knows it. A prefix without a final slash covers itself and what is below it.
    """

    host: str
    ports: tuple[int, ...] = WEB_PORTS
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    protocol: Protocol = "web"
    internal: bool = False
    target: str | None = None

    @property
    def restricted(self) -> bool:
        """Whether requests are to be read, not only counted."""
        return self.methods is not None or self.paths is not None

    def covers(self, name: str, port: int) -> bool:
        """Whether the rule speaks of `name` (in normal form) at `port`."""
        return port in self.ports and names.matches(self.host, name)

    def dials(self, port: int) -> tuple[str, int] | None:
        """Where an internal name is, if the rule says so."""
        if self.target is None:
            return None
        address, to = _split_target(self.target)
        return address, to or port


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """One document. `trust`: authorities (PEM) that servers may be certified by besides the machine's own roots (a
    company's); programs in a sandbox that is made with the policy believe them too. Made from code it is checked like
    one from a file."""

    mode: Mode = "none"
    rules: tuple[Rule, ...] = ()
    trust: str | None = None

    def __post_init__(self) -> None:
        # One way in: what code builds is judged, and put in normal form, by the same document as a file.
        document = _validate(_as_document(self), "network")
        object.__setattr__(self, "rules", tuple(_rule(entry) for entry in document.rules))

    def rules_for(self, name: str, port: int) -> tuple[Rule, ...]:
        """The rules that speak of `name` (in normal form) at `port`; none: it may not be reached."""
        return tuple(rule for rule in self.rules if rule.covers(name, port))

    def ports_of(self, name: str) -> frozenset[int]:
        """The ports at which `name` may be reached; none: it does not exist."""
        return frozenset(port for rule in self.rules if names.matches(rule.host, name) for port in rule.ports)

    def names_exactly(self, name: str) -> bool:
        """Whether a rule names it without a wildcard."""
        return any(rule.host == name for rule in self.rules)

    @property
    def public(self) -> bool:
        """Whether every public name may be reached."""
        return any(rule.host == "*" for rule in self.rules)

    @property
    def summary(self) -> str:
        """The word for a receipt: `none`, `allow`, `public` or `open`."""
        return "public" if self.public else self.mode

    def as_json(self) -> dict[str, Any]:
        """The document, with what is default left out."""
        return _as_document(self)

    @classmethod
    def from_json(cls, document: Any, *, field: str = "network") -> NetworkPolicy:
        """Read a document. Raises ConfigError that names the field."""
        parsed = _validate(document, field)
        return cls(parsed.mode, tuple(_rule(entry) for entry in parsed.rules), parsed.trust)

    @classmethod
    def parse(cls, text: str | bytes, *, field: str = "network") -> NetworkPolicy:
        """Read a document from its JSON text."""
        try:
            return cls.from_json(json.loads(text), field=field)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"is no JSON: {error}", field=field) from error

    @property
    def digest(self) -> str:
        """Digest of the document."""
        return digest_json(self.as_json())


def _as_document(policy: NetworkPolicy) -> dict[str, Any]:
    rules = []
    for rule in policy.rules:
        entry: dict[str, Any] = {"host": rule.host, "ports": list(rule.ports)}
        entry |= {name: list(value) for name in ("methods", "paths") if (value := getattr(rule, name)) is not None}
        entry |= {"protocol": rule.protocol} if rule.protocol != "web" else {}
        entry |= {"internal": rule.internal} if rule.internal else {}
        entry |= {"target": rule.target} if rule.target is not None else {}
        rules.append(entry)
    document: dict[str, Any] = {"format": FORMAT, "mode": policy.mode}
    document |= {"rules": rules} if rules else {}
    return document | ({"trust": policy.trust} if policy.trust is not None else {})


def _validate(document: Any, field: str) -> _PolicyDocument:
    try:
        return _PolicyDocument.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(message, field=f"{field}{where}", remedy="see docs/network.md") from error


def _rule(entry: _RuleDocument) -> Rule:
    return Rule(
        host=entry.host,
        ports=tuple(sorted(set(entry.ports))),
        methods=tuple(entry.methods) if entry.methods is not None else None,
        paths=tuple(entry.paths) if entry.paths is not None else None,
        protocol=entry.protocol,
        internal=entry.internal,
        target=entry.target,
    )


def _split_target(text: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[v6]:port`. The port may be left out: then it is the one that was dialled."""
    host, port = text, ""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535)):
        raise ValueError(f"{text!r} is not ADDRESS or ADDRESS:PORT")
    return host, int(port) if port else None


NONE = NetworkPolicy()
