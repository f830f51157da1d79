"""What the agent is told: `instruction.md` without the canary lines at its top."""

from __future__ import annotations

import re

_CANARY = re.compile(r"^\s*(?:<!--.*canary.*-->|#.*canary.*)\s*$", re.IGNORECASE)


def strip_canary(text: str) -> str:
    """Drop the leading HTML or `#` comment lines that contain "canary", and the blank lines after them.

    A canary marks data that must not be trained on; it is not part of the task. Text without one is unchanged.
    """
    lines = text.splitlines(keepends=True)
    count = 0
    while count < len(lines) and _CANARY.match(lines[count]):
        count += 1
    if count:
        while count < len(lines) and not lines[count].strip():
            count += 1
    return "".join(lines[count:])
