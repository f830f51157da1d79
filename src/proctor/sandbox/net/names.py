"""Host names as a policy writes them: one normal form, exact names, `*.suffix` and `*`."""

from __future__ import annotations

import re

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)")
_NAME_MAX = 253

RESOLVERS = frozenset(
    {
        "chrome.cloudflare-dns.com",
        "cloudflare-dns.com",
        "dns.adguard-dns.com",
        "dns.cloudflare.com",
        "dns.google",
        "dns.google.com",
        "dns.nextdns.io",
        "dns.quad9.net",
        "doh.cleanbrowsing.org",
        "doh.opendns.com",
        "mozilla.cloudflare-dns.com",
        "one.one.one.one",
    }
)
"""Public resolvers over HTTPS: a way around our answers, so `*` does not cover them (a rule that names one does)."""


def normal(name: str) -> str | None:
    """The normal form of a host name: lower case, without a final dot; None when it is none.

    What `inet_aton` would read as an address (`127.1`, `0x7f000001`, `2130706433`, `10.0.0.010`) is no name, whatever
    the spelling: a last label that is a number is refused.
    """
    text = name.lower().removesuffix(".")
    if not text or len(text) > _NAME_MAX or not text.isascii():
        return None
    labels = text.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        return None
    return text


def pattern(text: str) -> str | None:
    """The normal form of an exact name, `*.suffix` (of two labels at least) or `*`; None when it is none of these."""
    if text == "*":
        return text
    if text.startswith("*."):
        suffix = normal(text[2:])
        return f"*.{suffix}" if suffix is not None and "." in suffix else None
    return normal(text)


def matches(written: str, name: str) -> bool:
    """Whether `written` (a pattern in normal form) covers `name` (in normal form). `*.a.b` does not cover `a.b`."""
    if written == "*":
        return name not in RESOLVERS
    if written.startswith("*."):
        return name.endswith(written[1:]) and len(name) > len(written) - 1
    return written == name
