"""Other programs that builds need (mmdebstrap, skopeo, buildah, tar), run with their output kept, and progress."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import anyio
from anyio.streams.text import TextReceiveStream

from proctor.common import RefusedError
from proctor.sandbox.contract import ImageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from anyio.abc import ByteReceiveStream

_KEPT_LINES = 40


class Progress(Protocol):
    """Told what a build or pull is doing: step `step` of `total`, and one line of text."""

    def __call__(self, step: int, total: int, text: str) -> None: ...


def silent(step: int, total: int, text: str) -> None:
    """A Progress that nobody watches."""


def require_tool(name: str, package: str | None = None) -> str:
    """Full path of a program; RefusedError that says what to install."""
    path = shutil.which(name)
    if path is None:
        raise RefusedError(
            f"{name} is not installed", remedy=f"apt-get install --no-install-recommends {package or name}"
        )
    return path


def require_root(what: str) -> None:
    """Layers hold files of many owners, which only root can write."""
    if os.geteuid() != 0:
        raise RefusedError(f"{what} has to write files of other owners", remedy="run it as root")


async def run_tool(
    command: Sequence[str],
    *,
    what: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Progress | None = None,
    step: int = 0,
    total: int = 0,
) -> str:
    """Run a program to its end and return its standard output; each line of standard error goes to `on_line`.

    `env` is added to a small clean environment. ImageError, with the last lines, if it fails.
    """
    environment = {name: value for name, value in os.environ.items() if name in _PASSED or name in _TRUST}
    environment.update(env or {})
    errors: deque[str] = deque(maxlen=_KEPT_LINES)
    output: list[str] = []

    async def drain(stream: ByteReceiveStream | None, into: list[str] | deque[str], live: bool) -> None:
        if stream is None:
            return
        pending = ""
        async for text in TextReceiveStream(stream, errors="replace"):
            *lines, pending = (pending + text).split("\n")
            for line in lines:
                into.append(line)
                if live and on_line and line.strip():
                    on_line(step, total, line.strip())
        if pending:
            into.append(pending)

    async with await anyio.open_process(
        list(command), stdin=subprocess.DEVNULL, cwd=cwd, env=environment, start_new_session=True
    ) as process:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(drain, process.stdout, output, False)
                group.start_soon(drain, process.stderr, errors, True)
            code = await process.wait()
        except BaseException:
            # Cancelled: whatever it started goes with it, not only the program itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if code != 0:
        tail = " | ".join(line.strip() for line in list(errors)[-6:] if line.strip()) or "it printed nothing"
        raise ImageError(f"{what} failed with exit code {code}: {tail}")
    return "\n".join(output)


_PASSED = frozenset({"PATH", "LANG", "TZ", "HOME", "TMPDIR", "http_proxy", "https_proxy", "no_proxy"})
# Where this machine keeps the certificates it trusts, by the names that pip, curl, git, uv and OpenSSL read.
_TRUST = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"})
