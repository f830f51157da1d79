"""Secrets that a sandbox can use and never see.

Inside there is only a token. In the head of a request to a host that the secret is bound to, the token becomes the
value; in what comes back from there the value becomes asterisks. Everywhere else the token is worthless, and a request
that takes it elsewhere is refused and recorded.
"""

from __future__ import annotations

import base64
import binascii
import secrets as random_source
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from proctor.common import ConfigError
from proctor.sandbox.net import names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proctor.sandbox.net.httphead import Request

PREFIX = b"proctor-secret-"
_VALUE_MIN = 8


@dataclass(frozen=True, slots=True)
class Secret:
    """A value and the hosts (exact or `*.suffix`) that may get it. `plain` allows it over unencrypted HTTP too."""

    value: str = field(repr=False)
    hosts: tuple[str, ...]
    plain: bool = False

    def __post_init__(self) -> None:
        if len(self.value) < _VALUE_MIN or not self.value.isascii() or not self.value.isprintable():
            raise ConfigError(f"a secret has at least {_VALUE_MIN} characters, all printable ASCII", field="secrets")
        written = tuple(names.pattern(host) for host in self.hosts)
        if not written or "*" in written or None in written:
            raise ConfigError("a secret is bound to host names or `*.suffix`", field="secrets")
        object.__setattr__(self, "hosts", tuple(host for host in written if host is not None))


@dataclass(frozen=True, slots=True)
class _Held:
    name: str
    secret: Secret
    token: bytes

    def bound_to(self, name: str) -> bool:
        return any(names.matches(host, name) for host in self.secret.hosts)


class SecretElsewhere(ValueError):
    """A request takes a token to a host that it is not bound to."""


@dataclass(frozen=True, slots=True)
class Substituted:
    """A request with the values in place: `used` names the secrets, `exposed` is what must not come back."""

    request: Request
    used: tuple[str, ...]
    exposed: tuple[bytes, ...]


class Keyring:
    """The secrets of one sandbox and their tokens."""

    def __init__(self, secrets: dict[str, Secret] | None = None) -> None:
        self._held = tuple(
            _Held(name, secret, PREFIX + random_source.token_hex(16).encode())
            for name, secret in (secrets or {}).items()
        )

    @property
    def environment(self) -> dict[str, str]:
        """What the sandbox gets: for each secret its name and token."""
        return {held.name: held.token.decode() for held in self._held}

    def __bool__(self) -> bool:
        return bool(self._held)

    def bound(self, name: str) -> bool:
        """Whether some secret may go to `name`, so that its requests must be read."""
        return any(held.bound_to(name) for held in self._held)

    def exposed(self, name: str) -> tuple[bytes, ...]:
        """The values that a server at `name` may know."""
        return tuple(held.secret.value.encode() for held in self._held if held.bound_to(name))

    def substitute(self, request: Request, name: str, *, encrypted: bool) -> Substituted:
        """Put values in the place of tokens in the fields of `request`. Raises SecretElsewhere."""
        if not self._held:
            return Substituted(request, (), ())
        allowed = {held.token: held for held in self._held if held.bound_to(name) and (encrypted or held.secret.plain)}
        text = b"\n".join((request.target, *(part for pair in request.fields for part in pair)))
        text += b"\n" + b"\n".join(_credentials(value) or b"" for _, value in request.fields)
        elsewhere = [held.name for held in self._held if held.token in text and held.token not in allowed]
        if elsewhere:
            raise SecretElsewhere(",".join(elsewhere))
        used: dict[str, None] = {}
        exposed: list[bytes] = []
        fields = []
        for field_name, value in request.fields:
            new = _put(value, allowed.values(), used, exposed)
            fields.append((field_name, new))
        return Substituted(replace(request, fields=tuple(fields)), tuple(used), tuple(exposed))


def _put(value: bytes, allowed: Iterable[_Held], used: dict[str, None], exposed: list[bytes]) -> bytes:
    basic = _credentials(value)
    for held in allowed:
        real = held.secret.value.encode()
        if held.token in value:
            value = value.replace(held.token, real)
            used[held.name] = None
        if basic is not None and held.token in basic:
            basic = basic.replace(held.token, real)
            encoded = base64.b64encode(basic)
            value = b"Basic " + encoded
            used[held.name] = None
            exposed.append(encoded)
    return value


def _credentials(value: bytes) -> bytes | None:
    """What HTTP Basic credentials say, so that a token in a password is seen."""
    scheme, _, encoded = value.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        return None


class Mask:
    """Replaces values by asterisks of the same length in a stream, also where chunks cut one in two.

    Only a tail that may be the beginning of a value is held back, so a stream of events is not delayed.
    """

    def __init__(self, values: tuple[bytes, ...]) -> None:
        self._values = tuple(sorted(set(values), key=len, reverse=True))
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be passed on now."""
        data = self._held + data
        for value in self._values:
            data = data.replace(value, b"*" * len(value))
        keep = 0
        for value in self._values:
            longest = min(len(value) - 1, len(data))
            keep = max(keep, next((size for size in range(longest, 0, -1) if data.endswith(value[:size])), 0))
        self._held = data[len(data) - keep :] if keep else b""
        return self._without_halves(data[: len(data) - keep] if keep else data)

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def rest(self) -> bytes:
        """What was held back, at the end."""
        held, self._held = self._held, b""
        return self._without_halves(held)

    def _without_halves(self, data: bytes) -> bytes:
        """Servers cut what they quote, and the program decides where: the first or last half of a value is masked."""
        clean: bytearray | None = None
        for value in self._values:
            least = max(_VALUE_MIN, len(value) // 2)
            for part in (value[:least], value[-least:]):
                at = (clean or data).find(part)
                while at >= 0:
                    clean = clean or bytearray(data)
                    start, end = _reach(clean, at, value)
                    clean[start:end] = b"*" * (end - start)
                    at = clean.find(part, end)
        return data if clean is None else bytes(clean)


def _reach(data: bytearray, at: int, value: bytes) -> tuple[int, int]:
    """From where to where `data` is like `value`, around the half of it that is at `at`."""
    least = max(_VALUE_MIN, len(value) // 2)
    start, end = at, at + least
    if data[at:end] == value[:least]:
        while end < len(data) and end - at < len(value) and data[end] == value[end - at]:
            end += 1
    else:
        while start and end - start < len(value) and data[start - 1] == value[start - 1 - end]:
            start -= 1
    return start, end
