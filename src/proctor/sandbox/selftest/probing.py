"""Getting the probe into a sandbox and its report out, and what the host knows to hold against it."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from proctor.common import InfraError, state_dir
from proctor.sandbox._plans import is_open
from proctor.sandbox.native.plan import DEFAULT_CAPABILITIES
from proctor.sandbox.selftest.checks import View
from proctor.sandbox.selftest.facts import Facts

if TYPE_CHECKING:
    from proctor.sandbox.box import Box
    from proctor.sandbox.contract import ExecResult, SandboxSpec

BINARY: Final = Path(__file__).resolve().parent.parent / "_bin" / "proctor-probe"
_KINDS: Final = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup", "time")
REPORT_S: Final = 20.0


@cache
def binary() -> bytes:
    """The probe, a static program. Raises InfraError where it is not built."""
    try:
        return BINARY.read_bytes()
    except OSError as error:
        raise InfraError(f"{BINARY.name}: {error.strerror}", field="self_test", remedy="run scripts/build-c") from error


def place_name() -> str:
    """A path for the probe that nothing in an image can have waited at."""
    return f"/.proctor-probe-{secrets.token_hex(8)}"


async def place(box: Box) -> str:
    """Put the probe into a sandbox; its path there."""
    path = place_name()
    await box.write(path, binary(), mode=0o755)
    return path


async def report(box: Box, probe: str, user: str) -> Facts:
    """Run the probe as `user`. Raises InfraError when it does not report."""
    return read(await box.exec([probe, "facts"], cwd="/", user=user, timeout_s=REPORT_S))


def read(result: ExecResult) -> Facts:
    """The report of a probe that has run. Raises InfraError when there is none."""
    if not result.ok:
        what = result.reason or (f"signal {result.signal}" if result.signal else f"exit {result.exit_code}")
        detail = result.error_text.strip()[:200]
        raise InfraError(f"the probe failed: {what} {detail}", field="self_test")
    return Facts.parse(result.stdout.data)


def view(spec: SandboxSpec, pid: int | None, *, as_root: bool = True) -> View:
    """What the host knows of a sandbox; `pid`: one of its processes on the machine."""
    network: Literal["none", "carried", "open"] = "none"
    if is_open(spec):
        network = "open"
    elif not isinstance(spec.network, str):
        network = "carried"
    return View(
        runtime=spec.runtime,
        network=network,
        capabilities=DEFAULT_CAPABILITIES,
        namespaces=namespaces(),
        host_ids=_host_ids(pid),
        secrets=_secrets(),
        mounts=tuple(mount.target.rstrip("/") for mount in spec.mounts),
        cpus=spec.resources.cpus,
        hostname=spec.hostname,
        as_root=as_root,
    )


@cache
def namespaces() -> dict[str, str]:
    """The host's own."""
    found = {}
    for kind in _KINDS:
        with suppress(OSError):
            found[kind] = os.readlink(f"/proc/self/ns/{kind}")
    return found


@cache
def _secrets() -> tuple[str, ...]:
    """Names that tell where on the machine things are kept."""
    places = {str(state_dir().absolute()), os.environ.get("PROCTOR_IMAGES", ""), "proctor/", str(Path.home())}
    return tuple(sorted(place for place in places if len(place) > 3))


def _host_ids(pid: int | None) -> tuple[int, ...] | None:
    if pid is None:
        return None
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return tuple(int(word) for line in lines if line.startswith("Uid:") for word in line.split()[1:])
