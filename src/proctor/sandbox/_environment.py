"""What every command finds in its environment, and how the default user is asked for.

HOME, USER and LOGNAME are added by the guest from the sandbox's own /etc/passwd, where nothing above it says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proctor.sandbox.contract import Image, SandboxSpec

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TERMINAL = {"TERM": "xterm"}
"""What every terminal emulator understands; for commands with a terminal, below all other sources."""


def default_environment(spec: SandboxSpec, image: Image) -> dict[str, str]:
    """The environment that is the same for every command: defaults, then the image's, then the spec's."""
    return {"PATH": PATH, "LANG": "C.UTF-8", **image.env, **spec.env}


def default_user(spec: SandboxSpec, image: Image) -> str | None:
    """The user of commands that name none; None is root, for whom the guest needs no look-up."""
    user = spec.user or image.user
    return None if user in ("", "root", "0", "0:0", "root:root") else user
