"""Regression tests of the tools, run in an image: a broken tool must never be blamed on an agent.

A case is a few tool calls and what each has to come to, as data; it runs through the same toolbox and room as an
agent's calls do, in a sandbox of the image that is asked about. `proctor doctor --tools` prints the outcome.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proctor.agents.contract import ToolCall
from proctor.agents.limits import LimitGuard
from proctor.agents.room import BoundedRoom
from proctor.agents.simulated_user import UserDesk
from proctor.agents.tools import Toolbox
from proctor.common import ProctorError
from proctor.tasks.model import AgentLimits, AnswerRule, SimulatedUser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proctor.sandbox.contract import Sandbox

WORKDIR = "/tmp/proctor-tools"
_LIMITS = AgentLimits(total_s=600.0, tool_call_s=20.0, steps=1000)
_USER = SimulatedUser(rules=(AnswerRule("colour", "Green."),), max_questions=1)
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a case: `arguments` as an object, or as the raw text that a model may send. `result` is a
    pattern that its whole result has to match; `error` is the kind of error that it has to end with, if any."""

    tool: str
    arguments: Mapping[str, Any] | str
    result: str = ".*"
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """What a tool has to do, in words, and the calls that show it."""

    tool: str
    what: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case in one image. `problem` is empty when it came out as it should."""

    tool: str
    what: str
    problem: str = field(default="")

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.problem


def _bash(command: str, result: str = ".*", error: str | None = None, **more: Any) -> Call:
    return Call("bash", {"command": command, **more}, result, error)


CASES: tuple[Case, ...] = (
    Case("bash", "exit code and both streams come back", (
        _bash("echo out; echo err >&2; exit 3", "exit code: 3\nstdout:\nout\nstderr:\nerr"),)),
    Case("bash", "it starts in the working directory, in a new shell each time", (
        _bash("pwd; cd /; X=1", f"exit code: 0\nstdout:\n{WORKDIR}"),
        _bash('pwd; echo "x${X}"', f"exit code: 0\nstdout:\n{WORKDIR}\nx"))),
    Case("bash", "standard input is at its end", (_bash("cat; echo end", "exit code: 0\nstdout:\nend"),)),
    Case("bash", "a command that takes too long is killed with its children", (
        _bash("(sleep 30; echo late > late) & echo started; sleep 30", "(?s).*started.*", "timeout", timeout_s=1),
        _bash("sleep 0.2; ls late 2>/dev/null | wc -l", "exit code: 0\nstdout:\n *0"))),
    Case("bash", "what it starts in the background lives on", (
        _bash("(sleep 0.3; echo done > background) >/dev/null 2>&1 &", "exit code: 0"),
        _bash("for i in 1 2 3 4 5 6 7 8 9; do [ -e background ] && break; sleep 0.3; done; cat background",
              "exit code: 0\nstdout:\ndone"))),
    Case("bash", "a death by a signal is named", (_bash("kill -9 $$", "killed by signal 9"),)),
    Case("bash", "output that is not text does no harm", (
        _bash(r"printf 'a\377b\n'", "exit code: 0\nstdout:\na\ufffdb"),)),
    Case("bash", "a long output is cut in the middle, and the rest counted", (
        _bash("i=0; while [ $i -lt 3000 ]; do echo 0123456789; i=$((i+1)); done",
              r"(?s)exit code: 0\nstdout:\n0123456789\n.*\[… 17000 characters dropped …\].*0123456789"),)),
    Case("bash", "a command longer than an argument may be", (
        _bash("X=" + "y" * 200_000 + "; echo ${#X}", "exit code: 0\nstdout:\n200000"),)),
    Case("write_file", "a file with its directories, and what was in it before is gone", (
        Call("write_file", {"path": "w/a/b.txt", "content": "longer than the next\n"}, "wrote 21 bytes to w/a/b.txt"),
        Call("write_file", {"path": "w/a/b.txt", "content": "grün\n"}, "wrote 6 bytes to w/a/b.txt"),
        _bash("cat w/a/b.txt", "exit code: 0\nstdout:\ngrün"))),
    Case("write_file", "the mode of a file that exists stays", (
        _bash("mkdir -p w; echo x > w/tool; chmod 755 w/tool", "exit code: 0"),
        Call("write_file", {"path": "w/tool", "content": "#!/bin/sh\necho ran\n"}),
        _bash("./w/tool", "exit code: 0\nstdout:\nran"))),
    Case("write_file", "a directory in its place is an error", (
        Call("write_file", {"path": "/tmp", "content": ""}, error="file"),)),
    Case("read_file", "a whole file, and some of its lines", (
        Call("write_file", {"path": "r.txt", "content": "one\ntwo\nthree\n"}),
        Call("read_file", {"path": "r.txt"}, "one\ntwo\nthree\n"),
        Call("read_file", {"path": f"{WORKDIR}/r.txt", "offset": 2, "limit": 1}, r"two\n\n\[lines 2-2 of 3\]"))),
    Case("read_file", "a file that is not there, is not text, or is too short", (
        Call("read_file", {"path": "none"}, error="file"),
        _bash(r"printf 'a\000b' > binary; : > empty", "exit code: 0"),
        Call("read_file", {"path": "binary"}, error="binary"),
        Call("read_file", {"path": "empty"}, r"\[the file is empty\]"),
        Call("write_file", {"path": "short", "content": "x\n"}),
        Call("read_file", {"path": "short", "offset": 9}, error="range"))),
    Case("edit_file", "text that occurs once is replaced, and the rest stays", (
        _bash(r"printf 'caf\351 = 1\nx = 2\n' > e.txt", "exit code: 0"),
        Call("edit_file", {"path": "e.txt", "old_text": "x = 2", "new_text": "x = 3"}, "replaced 1 occurrence .*"),
        _bash("tail -n 1 e.txt; head -c 4 e.txt | od -An -tx1", "exit code: 0\nstdout:\nx = 3\n 63 61 66 e9"))),
    Case("edit_file", "text that occurs twice, or not at all, is refused", (
        Call("write_file", {"path": "e2.txt", "content": "a a\n"}),
        Call("edit_file", {"path": "e2.txt", "old_text": "a", "new_text": "b"}, error="edit_ambiguous"),
        Call("edit_file", {"path": "e2.txt", "old_text": "z", "new_text": "b"}, error="edit_missing"),
        Call("edit_file", {"path": "e2.txt", "old_text": "a", "new_text": "a"}, error="edit_unchanged"),
        Call("edit_file", {"path": "e2.txt", "old_text": "a", "new_text": "b", "replace_all": True}),
        Call("read_file", {"path": "e2.txt"}, "b b\n"))),
    Case("ask_user", "the user answers as the task says, and not for ever", (
        Call("ask_user", {"question": "Which colour?"}, "Green\\."),
        Call("ask_user", {"question": "Which colour?"}, error="no_more_questions"))),
    Case("any tool", "a malformed call is answered with what is wrong", (
        Call("bash", '{"command": ', error="invalid_json"),
        Call("bash", "[]", error="invalid_json"),
        Call("shell", {}, error="unknown_tool"),
        Call("bash", {"cmd": "ls"}, error="invalid_arguments"),
        Call("read_file", {"path": "a\0b"}, error="invalid_arguments"))),
    Case("finish", "it ends the work: what comes after is not run", (
        Call("finish", {"message": "done"}, "finished"),
        _bash("echo no", error="already_finished"))),
)  # fmt: skip


async def check_tools(box: Sandbox, cases: Sequence[Case] = CASES) -> list[Outcome]:
    """Run the cases in a sandbox, each in an empty working directory. A case that cannot be run is a problem, too."""
    outcomes = []
    for case in cases:
        try:
            problem = await _problem(box, case)
        except (ProctorError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        outcomes.append(Outcome(case.tool, case.what, problem))
    return outcomes


async def _problem(box: Sandbox, case: Case) -> str:
    """What is wrong with the first call that does not come out as it should; empty when none is."""
    made = await box.exec(["/bin/sh", "-c", f"rm -rf {WORKDIR} && mkdir -p {WORKDIR}"], cwd="/", timeout_s=20)
    if not made.ok:
        return f"no working directory: {made.error_text.strip()[:_SHOWN_CHARS] or made.exit_code}"
    tools = Toolbox(BoundedRoom(box, WORKDIR, LimitGuard(_LIMITS)), user=UserDesk(_USER))
    for number, wanted in enumerate(case.calls, 1):
        raw = wanted.arguments if isinstance(wanted.arguments, str) else json.dumps(dict(wanted.arguments))
        call = ToolCall(f"call-{number}", wanted.tool, {}, raw)
        result = await tools.run(call)
        kind = call.error.partition(":")[0] if call.error else None
        if kind != wanted.error:
            return f"call {number} ({wanted.tool}) ended with {call.error or 'no error'}, not {wanted.error or 'none'}"
        if wanted.error is None or wanted.result != ".*":
            said = _output(result) if kind else result
            if re.fullmatch(wanted.result, said, re.DOTALL if wanted.result == ".*" else 0) is None:
                return f"call {number} ({wanted.tool}) came back with {said[:_SHOWN_CHARS]!r}"
    return ""


def _output(result: str) -> str:
    """What a command had printed when it ended with an error."""
    return str(json.loads(result)["error"].get("output", ""))
