"""What an Edge writes down of its durable sandboxes, and how a later Edge takes them over (docs/design/durable.md).

Below `<edge>/boxes/<sandbox>/`: `box.json` (what was asked for) before the sandbox is made, `live.json` (what came
of it) once its guest has answered, `network.json` once its policy has been changed, and the log and output of its
commands. A sandbox that has no `live.json`, or whose journal says that it was being ended, is ended by the next Edge;
all others go on.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from pydantic import BaseModel, ConfigDict

from proctor.common import ConfigError, InfraError
from proctor.sandbox import sweep
from proctor.sandbox._carry import carried
from proctor.sandbox._durable import Commands
from proctor.sandbox._faults import point
from proctor.sandbox.box import Box
from proctor.sandbox.contract import EndReason, Image, LaunchError, Layer, SandboxLost, SandboxSpec
from proctor.sandbox.journal import State
from proctor.sandbox.net.policy import NetworkPolicy
from proctor.sandbox.receipts import Peaks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.sandbox.edge import Edge
    from proctor.sandbox.journal_reader import JournalRecord
    from proctor.sandbox.native.plan import Held

log = logging.getLogger(__name__)

VERSION = 1
_BOX, _LIVE, _NETWORK = "box.json", "live.json", "network.json"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION


class BoxRecord(_Record):
    """What was asked for, and when."""

    sandbox: str
    spec: SandboxSpec
    image: Image
    base: tuple[Layer, ...]
    created_at: str
    ends_ms: int
    """When its time is up, on CLOCK_BOOTTIME; 0: never."""
    request: str | None = None


# The contract names it without importing it: policies are heavier than most sandboxes need.
BoxRecord.model_rebuild(_types_namespace={"NetworkPolicy": NetworkPolicy})


class LiveRecord(_Record):
    """The present incarnation."""

    incarnation: int
    slot: str
    pid: int
    start_time: int
    """The guest's, in clock ticks since boot (proc_pid_stat(5), field 22): a pid is used again, a pair is not."""
    stack: tuple[Layer, ...]
    mechanisms: dict[str, str]
    driver: str
    execs: int
    peaks: Peaks
    self_test: dict[str, str | int] = {}


def boot_ms() -> int:
    """Milliseconds of CLOCK_BOOTTIME, which neither a set clock nor a sleeping machine moves."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot. Raises ProcessLookupError or FileNotFoundError when it is
    gone."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rsplit(")", 1)[1].split()[19])


def _write_whole(path: Path, data: bytes) -> None:
    """The old content or the new, never a part. Not flushed: what a death of the machine loses, it has ended too."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


class Estate:
    """The records of one Edge's durable sandboxes."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the Edge's directory."""
        self._root = folder / "boxes"

    def folder(self, sandbox: str) -> Path:
        """The directory of a sandbox's records."""
        return self._root / sandbox

    def open_box(self, box: Box, request: str | None) -> Commands:
        """Write down what is about to be made. Raises InfraError when the disk is full: then it must not be made."""
        folder = self.folder(box.id)
        life = box.spec.lifecycle
        record = BoxRecord(
            sandbox=box.id,
            spec=box.spec,
            image=box.image,
            base=box._base,
            created_at=box._history.created_at,
            ends_ms=0 if life.ttl_s is None else boot_ms() + int(life.ttl_s * 1000),
            request=request,
        )
        try:
            folder.mkdir(parents=True, mode=0o700)
            _write_whole(folder / _BOX, record.model_dump_json().encode())
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise InfraError(f"cannot write {folder / _BOX}: {error.strerror}", remedy="free disk space") from error
        box._ends_ms = record.ends_ms
        return Commands(folder)

    def note_live(self, box: Box) -> None:
        """Write down the present incarnation."""
        live = box._live
        assert live is not None
        assert live.pid is not None
        record = LiveRecord(
            incarnation=live.number,
            slot=live.slot,
            pid=live.pid,
            start_time=start_time(live.pid),
            stack=box._stack,
            mechanisms=dict(live.mechanisms),
            driver=live.driver,
            execs=box._history.execs,
            peaks=box._history.peaks,
            self_test=dict(box._history.self_test),
        )
        path = self.folder(box.id) / _LIVE
        try:
            _write_whole(path, record.model_dump_json().encode())
        except OSError as error:
            raise InfraError(f"cannot write {path}: {error.strerror}", remedy="free disk space") from error

    def note_policy(self, sandbox: str, policy: NetworkPolicy, version: int) -> None:
        """Write down a policy that is about to be in force: a later Edge must not go back to a wider one."""
        path = self.folder(sandbox) / _NETWORK
        try:
            _write_whole(path, json.dumps({"version": version, "policy": policy.as_json()}).encode())
        except OSError as error:
            raise InfraError(f"cannot write {path}: {error.strerror}", remedy="free disk space") from error

    def policy(self, sandbox: str) -> tuple[NetworkPolicy, int] | None:
        """The policy that was last written down; None: it is still the spec's. One that cannot be read is `none`."""
        try:
            document = json.loads((self.folder(sandbox) / _NETWORK).read_bytes())
            return NetworkPolicy.from_json(document["policy"]), int(document["version"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError, ConfigError) as error:
            log.warning("%s: its network policy cannot be read, so it has none: %s", sandbox, error)
            return NetworkPolicy(), 1

    def remove(self, sandbox: str) -> None:
        """Nothing of the sandbox is left. Never raises: what cannot be removed goes with the Edge's directory."""
        shutil.rmtree(self.folder(sandbox), ignore_errors=True)

    def sandboxes(self) -> list[str]:
        """Names of all that have records."""
        return sorted(path.name for path in self._root.iterdir()) if self._root.is_dir() else []

    def read(self, sandbox: str) -> tuple[BoxRecord, LiveRecord] | None:
        """The records of a sandbox; None when they are not whole."""
        folder = self.folder(sandbox)
        try:
            box = BoxRecord.model_validate_json((folder / _BOX).read_bytes())
            return box, LiveRecord.model_validate_json((folder / _LIVE).read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            log.warning("%s: its records cannot be read: %s", sandbox, error)
            return None


async def adopt(edge: Edge, held: list[Held], journal: Mapping[str, JournalRecord]) -> None:
    """Take over what an earlier Edge of the same directory has left: `held` by its launcher, told by its `journal`."""
    by_name = {one.name: one for one in held}
    estate = edge._estate
    claimed: set[str] = set()
    async with anyio.create_task_group() as tasks:
        for sandbox in estate.sandboxes():
            records = estate.read(sandbox)
            state = journal[sandbox].state if sandbox in journal else State.CLOSED
            if records is None or state is not State.CREATED:
                continue
            box, live = records
            found = by_name.get(f"{sandbox}-{live.incarnation}")
            claimed.add(sandbox)
            tasks.start_soon(_adopt_one, edge, box, live, found)
    for name in set(estate.sandboxes()) - claimed:
        estate.remove(name)
    await _end_unclaimed(edge, held, journal, claimed)


async def _adopt_one(edge: Edge, record: BoxRecord, live: LiveRecord, held: Held | None) -> None:
    reason, detail = await _try_to_adopt(edge, record, live, held)
    if reason is not None:
        log.warning("sandbox %s did not outlive its Edge: %s: %s", record.sandbox, reason, detail)
        edge._note(record.sandbox, State.CLOSING, reason=reason, detail=detail)
        if held is not None:
            await edge._runtimes.native.destroy(held.slot)
        edge._note(record.sandbox, State.CLOSED, reason=reason)
        edge._estate.remove(record.sandbox)


async def _try_to_adopt(
    edge: Edge, record: BoxRecord, live: LiveRecord, held: Held | None
) -> tuple[EndReason | None, str]:
    """None and nothing when it lives here now; otherwise why it has ended, or has to."""
    native = edge._runtimes.native
    if held is None:
        return EndReason.GUEST_LOST, "its guest ended while its Edge was alive"
    if held.expired:
        return EndReason.TTL, f"older than {record.spec.lifecycle.ttl_s:g} s"
    if held.dead:
        kills = native.oom_kills(held.slot)
        if kills:
            return EndReason.OOM, f"it had no Edge; the kernel killed for memory {kills} times"
        return EndReason.GUEST_LOST, "its guest ended while it had no Edge"
    if held.pid != live.pid or _started(held.pid) != live.start_time:
        return EndReason.EDGE_LOST, f"process {held.pid} is not the guest that was written down"
    commands = Commands(edge._estate.folder(record.sandbox))
    box = restore(edge, record, live, commands)
    try:
        incarnation = await native.adopt(held, live, commands)
        point("adopt:after-channel")
        await edge._take_over(box, incarnation)
    except (LaunchError, SandboxLost, InfraError, OSError) as error:
        commands.close()
        return EndReason.GUEST_LOST, f"its guest did not come back: {error}"
    point("adopt:after-hello")
    return None, ""


def _started(pid: int) -> int:
    try:
        return start_time(pid)
    except (FileNotFoundError, ProcessLookupError):
        return -1


def restore(edge: Edge, record: BoxRecord, live: LiveRecord, commands: Commands) -> Box:
    """The handle of a sandbox as it was when its records were written."""
    carry = carried(record.spec, None, None, None, None, edge._get_dialer)
    boundary = carry(record.sandbox, edge._tasks.start_soon) if carry is not None else None
    if boundary is not None and (noted := edge._estate.policy(record.sandbox)) is not None:
        boundary.restore(*noted)
    box = Box(edge, record.sandbox, record.spec, record.image, record.base, edge._runtimes.native, boundary)
    box._stack = live.stack
    box._ends_ms = record.ends_ms
    box._request = record.request
    box._commands = commands
    history = box._history
    history.created_at = record.created_at
    history.incarnation = live.incarnation
    history.execs = max(live.execs, commands.count)
    history.mechanisms = live.mechanisms
    history.peaks = live.peaks
    history.self_test = live.self_test
    history.adopted += 1
    return box


async def _end_unclaimed(edge: Edge, held: list[Held], journal: Mapping[str, JournalRecord], claimed: set[str]) -> None:
    """Sandboxes that were being made or ended when their Edge died are nobody's: nobody ever got them, or wants
    them."""
    for one in held:
        if one.name.rpartition("-")[0] not in claimed:
            await edge._runtimes.native.destroy(one.slot)
    for sandbox, record in journal.items():
        if sandbox not in claimed:
            reason = record.reason or EndReason.EDGE_LOST
            edge._note(sandbox, State.CLOSED, reason=reason)


def take_over(home: Path, only: str | None = None) -> sweep.EdgeDirectory | None:
    """The directory of an Edge that is gone and whose launcher lives, now ours; None when there is none (called
    `only`)."""
    for path in sweep.orphans(home):
        if only is not None and path.name != only:
            continue
        if (directory := sweep.EdgeDirectory.reopen(path)) is not None:
            return directory
    return None
