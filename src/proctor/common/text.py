"""Foreign text made safe to show: whatever came from a sandbox or a model must not move or recolour anything."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Control characters, bidirectional overrides, invisible characters and lone surrogates as visible escapes.

    Tabs and newlines stay. The result can be encoded as UTF-8 and, once escaped, be put into HTML or XML 1.0.
    """
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)
