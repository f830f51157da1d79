"""What an agent did in one trial, in the terms that runs are compared in.

A *behaviour* is read from a trial's record (`proctor.runs.behaviour`): its tool calls as actions, with a digest of
what was asked and of what came back, and for each a pointer to the evidence. What an action is for (reading, writing,
checking) is a guess from its name and text.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from proctor.analysis.shell import hosts_in, read_shell
from proctor.common import canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["read", "run", "write", "verify", "finish", "other"]

_COMMAND_KEYS = ("command", "cmd", "keystrokes", "script", "code")
_EDITOR_VERBS: Mapping[str, Kind] = {
    "view": "read",
    "create": "write",
    "str_replace": "write",
    "insert": "write",
    "undo_edit": "write",
}
_BY_NAME: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("finish", re.compile(r"finish|submit|complete|final_answer|\bdone\b")),
    ("other", re.compile(r"think|plan|todo|task_tracker|memory")),
    ("write", re.compile(r"write|edit|create|replace|insert|patch|apply|delete|remove|move|rename|append|upload|save")),
    ("verify", re.compile(r"test|lint|check|verify|validate")),
    ("read", re.compile(r"read|view|open|cat|list|ls|search|grep|find|glob|get|fetch|query|show|lookup|browse|scroll")),
)


@dataclass(frozen=True, slots=True)
class Action:
    """One call of a tool. `shape` is what it was in kind (tool, names of arguments, program), `call` and `result` are
    digests of exactly what was asked and what came back (None: nothing is on record)."""

    tool: str
    shape: str
    kind: Kind
    call: str
    result: str | None
    failed: bool
    evidence: str
    """Where it is on record: `trajectory.json#/steps/3/tool_calls/0`, `exec.jsonl#4`."""
    text: str = ""
    """The call for people, shortened."""
    programs: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    checked: bool = False
    """It ran or checked something, after anything that it wrote itself."""
    injected: bool = False
    """It was made to go wrong on purpose; nobody's failure."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One trial: what it was, what it came to, what it did and what that took. Unknown amounts are None."""

    trial: str
    run: str
    task: str
    agent: str
    actions: tuple[Action, ...]
    outcome: str = "resolved"
    score: float | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    wall_s: float | None = None
    returned_models: tuple[str, ...] = ()
    task_digest: str | None = None
    image_digest: str | None = None
    limits: str | None = None
    condition: str = "plain"
    cluster: str | None = None
    programs: Mapping[str, str] = field(default_factory=dict)
    """Programs that ran, with evidence; the host's own log counts too, whatever the harness reports."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    writes: Mapping[str, str] = field(default_factory=dict)
    record: str | None = None

    @property
    def sequence(self) -> tuple[str, ...]:
        """The shapes of its actions, in order."""
        return tuple(action.shape for action in self.actions)

    @property
    def tools(self) -> dict[str, int]:
        """How often each tool was called."""
        tally: dict[str, int] = {}
        for action in self.actions:
            tally[action.tool] = tally.get(action.tool, 0) + 1
        return tally

    def repeats(self) -> tuple[Action, ...]:
        """Actions that asked again what had been asked, and got the same answer, with nothing written in between."""
        seen: set[tuple[str, str | None]] = set()
        found = []
        for action in self.actions:
            if action.kind == "write":
                seen.clear()
                continue
            key = (action.call, action.result)
            if key in seen:
                found.append(action)
            seen.add(key)
        return tuple(found)

    def share(self, *kinds: Kind) -> float | None:
        """The share of actions that are of these kinds; None without an action."""
        if not self.actions:
            return None
        return sum(action.kind in kinds for action in self.actions) / len(self.actions)

    @property
    def unverified_edits(self) -> int:
        """Writes after the last action that ran or checked anything."""
        count = 0
        for action in self.actions:
            if action.checked:
                count = 0
            elif action.kind == "write":
                count += 1
        return count


def tool_action(tool: str, arguments: Mapping[str, Any], *, result: str | None, failed: bool, evidence: str) -> Action:
    """The action of a tool call as a trajectory has it."""
    text = _command(arguments)
    call = _digest(canonical(tool, arguments))
    answer = _digest(result) if result is not None else None
    keys = ",".join(sorted(arguments))
    if text is not None and text in _EDITOR_VERBS:
        path = arguments.get("path")
        writes = (path,) if isinstance(path, str) and _EDITOR_VERBS[text] == "write" else ()
        return Action(tool, f"{tool} {text}({keys})", _EDITOR_VERBS[text], call, answer, failed, evidence,
                      _shown(tool, arguments), writes=writes)  # fmt: skip
    if text is not None:
        shell = read_shell(text)
        kind: Kind = shell.kind if "code" not in arguments else "run"
        shape = f"{tool} {'; '.join(shell.programs)}({keys})"
        return Action(tool, shape, kind, call, answer, failed, evidence, _shown(tool, arguments), shell.programs,
                      shell.hosts, shell.writes, shell.checked or kind == "run")  # fmt: skip
    kind = next((kind for kind, pattern in _BY_NAME if pattern.search(tool.lower())), "other")
    path = next((value for key in ("path", "file", "file_path") if isinstance(value := arguments.get(key), str)), None)
    hosts = (
        hosts_in(" ".join(value for value in arguments.values() if isinstance(value, str))) if kind == "read" else ()
    )
    return Action(tool, f"{tool}({keys})", kind, call, answer, failed, evidence, _shown(tool, arguments), hosts=hosts,
                  writes=(path,) if path is not None and kind == "write" else (), checked=kind == "verify")  # fmt: skip


def exec_action(
    kind: str,
    subject: str,
    *,
    result: str | None,
    failed: bool,
    evidence: str,
    content: str | None = None,
    injected: bool = False,
) -> Action:
    """The action of a call on the sandbox as the host saw it (`exec.jsonl`). `content` is a digest of what a file
    operation read or wrote."""
    call = _digest(f"{kind}\0{subject}\0{content or ''}" if kind == "write" else f"{kind}\0{subject}")
    shown = _short(f"{kind} {subject}")
    if kind in ("bash", "run"):
        shell = read_shell(subject)
        shape = f"{kind} {'; '.join(shell.programs)}"
        return Action(kind, shape, shell.kind, call, result, failed, evidence, shown, shell.programs, shell.hosts,
                      shell.writes, shell.checked, injected)  # fmt: skip
    purpose: Kind = "write" if kind == "write" else "read"
    writes = (subject,) if kind == "write" else ()
    return Action(kind, kind, purpose, call, result or content, failed, evidence, shown, writes=writes,
                  injected=injected)  # fmt: skip


def _command(arguments: Mapping[str, Any]) -> str | None:
    """The command that a tool was given, as text or as a list of words."""
    for key in _COMMAND_KEYS:
        if isinstance(value := arguments.get(key), str):
            return value
    argv = arguments.get("argv")
    return shlex.join(argv) if isinstance(argv, list) and all(isinstance(word, str) for word in argv) else None


def canonical(tool: str, arguments: Mapping[str, Any]) -> str:
    """A call as text that is the same whatever the order of its arguments."""
    return f"{tool}\0{canonical_json(dict(arguments)).decode('utf-8', 'backslashreplace')}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _shown(tool: str, arguments: Mapping[str, Any]) -> str:
    values = ", ".join(str(value) for value in arguments.values())
    return _short(f"{tool} {values}")


def _short(text: str, most: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
