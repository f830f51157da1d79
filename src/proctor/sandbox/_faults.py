"""Places where a test may kill the process, to prove that nothing is left behind whenever it dies.

`PROCTOR_FAULT=create:after-launch` makes the process end itself with SIGKILL when it gets there. Tests only.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "start:after-lock",
    "start:after-launcher",
    "create:after-intent",
    "create:after-disk",
    "create:after-launch",
    "create:after-hello",
    "create:after-created",
    "close:after-closing",
    "close:after-kill",
    "close:after-cgroup",
    "close:after-upper",
    "close:after-closed",
    "stop:before-launcher",
    "stop:before-directory",
)

DURABLE_POINTS = (
    "create:after-record",
    "create:after-live",
    "exec:after-record",
    "exec:after-send",
    "exec:after-spool",
    "exec:before-done",
    "adopt:after-channel",
    "adopt:after-hello",
    "leave:after-channel",
)
"""Those that only a durable Edge reaches."""

_chosen = os.environ.get("PROCTOR_FAULT")


def point(name: str) -> None:
    """Die here if the environment says so."""
    if _chosen == name:
        os.kill(os.getpid(), signal.SIGKILL)
