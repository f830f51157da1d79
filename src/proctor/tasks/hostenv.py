"""Values of task environments that come from the host: `${VAR}` and `${VAR:-default}`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def resolve(text: str, host: Mapping[str, str]) -> tuple[str, list[str]]:
    """Replace every reference in `text`; returns the value and the names that the host does not set.

    A default is used when the variable is unset or empty, as in a shell.
    """
    missing: list[str] = []

    def value(found: re.Match[str]) -> str:
        name, default = found.group(1), found.group(2)
        if default is not None:
            return host.get(name) or default
        if name not in host:
            missing.append(name)
            return ""
        return host[name]

    return _REFERENCE.sub(value, text), missing
