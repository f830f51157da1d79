"""A file of model calls that survives the death of whoever writes it: whole lines only, and no call that began is lost.

Calls in flight are in a second file, `FILE.begun`. What is found there at the start never ended: it is put on record as
cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
from typing import TYPE_CHECKING, BinaryIO

from proctor.common import ConfigError, InfraError
from proctor.runs.calls import call_line, lost_line
from proctor.runs.formats import dump_json

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.models.gateway import CallRecord
    from proctor.models.gateway.calls import Begun

_COMPACT_BYTES = 1 << 20


class CallFile:
    """Calls, one `ModelCallLine` each. Opened for one writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun_path = path.with_name(path.name + ".begun")
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lost = _unended(self._begun_path)
            _mend(path)
            for line in lost:
                _write(self._file, line)
            os.fsync(self._file)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._begun = os.open(self._begun_path, flags, 0o600)
        except BlockingIOError as error:
            raise ConfigError("another gateway writes to it", field=f"--record {path}",
                              remedy="choose another file") from error  # fmt: skip
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", field=f"--record {path}",
                              remedy="choose another file") from error  # fmt: skip
        self.recovered = len(lost)
        self._in_flight: set[int] = set()
        self._begun_bytes = 0

    def begun(self, call: Begun) -> None:
        """A call goes upstream."""
        self._in_flight.add(call.number)
        head = json.dumps({"number": call.number, "at": call.at, "protocol": call.operation, "model": call.asked_model,
                           "pinned": call.pinned_model, "upstream": call.upstream})  # fmt: skip
        # The request is JSON already; line ends in it can only be space between its parts.
        request = call.request.replace(b"\r", b" ").replace(b"\n", b" ")
        self._note(head[:-1].encode() + b',"request":' + request + b"}\n")

    def append(self, call: CallRecord) -> None:
        """A call ends. Raises InfraError when it cannot be written; its answer is then not finished."""
        try:
            _write(self._file, dump_json(call_line(call)))
        except OSError as error:
            raise InfraError(f"the call cannot be recorded: {error.strerror}", field="--record") from error
        if call.number in self._in_flight:
            self._in_flight.discard(call.number)
            self._note(b'{"ended":%d}\n' % call.number)

    def close(self) -> None:
        """Close both files; without calls in flight the second one goes."""
        os.close(self._file)
        os.close(self._begun)
        if not self._in_flight:
            self._begun_path.unlink(missing_ok=True)

    def _note(self, data: bytes) -> None:
        try:
            if not self._in_flight and self._begun_bytes > _COMPACT_BYTES:
                os.ftruncate(self._begun, 0)
                self._begun_bytes = 0
                return
            _write(self._begun, data)
        except OSError as error:
            raise InfraError(f"the call cannot be recorded: {error.strerror}", field="--record") from error
        self._begun_bytes += len(data)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _unended(path: Path) -> list[bytes]:
    """The lines of calls that began and never ended. The last line of a killed writer may be a part, and is left out:
    its call had not gone upstream."""
    if not path.exists():
        return []
    found: dict[int, bytes] = {}
    for text in path.read_bytes().split(b"\n")[:-1]:
        value = json.loads(text)
        if "ended" in value:
            found.pop(value["ended"], None)
        else:
            found[value["number"]] = dump_json(lost_line(value))
    return list(found.values())


def _mend(path: Path) -> None:
    """Move a line that was cut short from the end of the file to `FILE.torn`."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        whole = _after_last_newline(file, end)
        if whole < end:
            file.seek(whole)
            with path.with_name(path.name + ".torn").open("ab") as torn:
                torn.write(file.read() + b"\n")
            file.truncate(whole)


def _after_last_newline(file: BinaryIO, end: int) -> int:
    """The offset after the last newline before `end`; 0 when there is none."""
    at = end
    while at > 0:
        begin = max(0, at - 65536)
        file.seek(begin)
        found = file.read(at - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0
