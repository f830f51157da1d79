"""A witness in the verifier's own pytest sessions: it testifies and changes nothing.

Harbor's test.sh usually trusts pytest's exit code, so code that a test imports could earn a reward with
`os._exit(0)`. Through
a plug-in that the verifier's Python finds by PYTHONPATH, every session says over a pipe that it began, that it
ended, and whether a test that must fail still fails in it. Only a reward that would resolve the task is ever doubted,
and only for what was seen; a verifier that the witness cannot enter (`python -I`, another language) is graded without.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from proctor.grading.channel import TOOLKIT
from proctor.grading.contract import GradeFinding
from proctor.grading.report import parse_report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.sandbox.contract import Sandbox

PLACE = f"{TOOLKIT}/witness"
_LINE = re.compile(rb"([0-9a-f]{16}) (.+)")


@dataclass(frozen=True, slots=True)
class Witness:
    """One run's witness: the descriptor its reports come over, and the key they are made with."""

    report_fd: int
    nonce: bytes

    @classmethod
    def new(cls) -> Witness:
        """A witness with a key of its own."""
        return cls(32 + secrets.randbelow(64), secrets.token_bytes(32))

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` with what lets the verifier's Pythons find the witness."""
        path = ":".join(part for part in (PLACE, env.get("PYTHONPATH", "")) if part)
        return {**env, "PYTHONPATH": path, "PROCTOR_WITNESS": f"{self.report_fd}:{self.nonce.hex()}:{TOOLKIT}"}

    def doubts(self, raw: bytes) -> list[GradeFinding]:
        """Why a reward that resolves must not be believed; empty when nothing speaks against it."""
        sessions: dict[str, bytes] = {}
        found: list[GradeFinding] = []
        for line in raw.split(b"\n")[:-1]:
            match = _LINE.fullmatch(line)
            if match is None:
                found.append(GradeFinding("witness", "somebody else wrote to the witness's pipe", "review"))
                break
            session, rest = match.groups()
            sessions[session.decode()] = sessions.get(session.decode(), b"") + rest + b"\n"
        for session, lines in sessions.items():
            key = hmac.new(self.nonce, session.encode(), hashlib.sha256).digest()
            report = parse_report(lines, key, runner="witness")
            if report.broken:
                found.append(GradeFinding("witness", f"a session's report is broken: {report.broken}", "review"))
            elif not report.ended:
                found.append(
                    GradeFinding("witness", "a pytest session of the verifier began and did not end", "review")
                )
            elif report.session is not None and report.session.decoy == "passed":
                found.append(
                    GradeFinding("witness", "a test that must fail passed in the verifier's session", "review")
                )
            elif report.session is not None and report.session.conflicts:
                count = report.session.conflicts
                found.append(GradeFinding("witness", f"{count} tests raised and were reported as passed", "review"))
        return found


async def place_witness(box: Sandbox) -> None:
    """Write the witness beside the toolkit, which must be there."""
    folder = resources.files("proctor.grading") / "assets" / "witness"
    for file in folder.iterdir():
        if file.name.endswith(".py"):
            await box.write(f"{PLACE}/{file.name}", file.read_bytes(), mode=0o444)
