"""The host's half of the verdict channel: what the test process is told, and how its start is spelled."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.common import ConfigError
from proctor.grading.command import Invocation, split_env, without_start_up
from proctor.grading.compat import is_cut
from proctor.grading.sentinels import SentinelPlan, plan_sentinels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.tasks.model import TestSpec

TOOLKIT = "/opt/proctor-toolkit"
"""Where the toolkit lies in the clean room: owned by root, written after the deliverable is in place."""
IN_PROCESS = ("pytest", "unittest", "django", "sympy")
"""Runners that our entry hosts; the others report in ways of their own (see docs/design/verdict-channel.md)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of the test process. `stdin` holds the nonce and must reach nobody else."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdin: bytes
    report_fd: int
    nonce: bytes
    sentinels: SentinelPlan


def toolkit_files() -> dict[str, bytes]:
    """The files of the toolkit by name."""
    folder = resources.files("proctor.grading") / "assets" / "toolkit"
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name.endswith(".py")}


def prepare(
    spec: TestSpec,
    invocation: Invocation,
    *,
    python: str,
    script: str | None,
    env: Mapping[str, str],
    toolkit: str = TOOLKIT,
    cwd: str | None = None,
) -> Launch:
    """Everything needed to start `invocation` under the channel.

    `python` is the interpreter inside, `script` the absolute path of the program (None for `python -m`).
    """
    expected = [*spec.fail_to_pass, *spec.pass_to_pass]
    plan = plan_sentinels(expected)
    nonce = secrets.token_bytes(32)
    fd = 32 + secrets.randbelow(64)
    early, late = split_env({**env, **invocation.env})
    early.setdefault("PYTHONHASHSEED", str(secrets.randbelow(2**32)))
    early["PYTHONDONTWRITEBYTECODE"] = "1"
    directory = cwd or spec.cwd
    module = invocation.module
    if script is not None:
        path0: str | None = str(Path(script).parent)
        argv0 = script
    else:
        path0, argv0 = directory, f"{python} -m {module}"
    if spec.runner == "pytest":
        if module not in (None, "pytest"):
            raise ConfigError(f"a pytest group cannot be run by module {module!r}", field="command")
    elif script is None and spec.runner != "unittest":
        raise ConfigError(f"a {spec.runner} group is run by a script, not by `python -m`", field="command")
    config = {
        "fd": fd,
        "nonce": nonce.hex(),
        "runner": spec.runner,
        "argv": [argv0, *invocation.args],
        "module": module if spec.runner == "unittest" else None,
        "path0": path0,
        "python_env": late,
        "cwd": directory,
        "expected": expected,
        "cut": [test_id for test_id in expected if spec.truncated_ids and is_cut(test_id)],
        "sentinels": plan.wire(),
    }
    argv = (*without_start_up(), python, "-S", "-s", f"{toolkit}/entry.py")
    return Launch(argv, early, json.dumps(config).encode(), fd, nonce, plan)
