"""Running tests/test.sh by Harbor's protocol in a room, and reading what it left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proctor.common import ConfigError, InfraError
from proctor.grading.contract import GradeFinding
from proctor.grading.guard import RewardGuard
from proctor.grading.reward import MAX_REWARD_BYTES, BadReward, Rewards, parse_json, parse_text
from proctor.grading.room import check_started, discard, place_toolkit
from proctor.grading.witness import Witness, place_witness
from proctor.sandbox.contract import EndReason, FileError, OutputLimit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from proctor.sandbox.contract import ExecResult, Sandbox
    from proctor.tasks.model import Verifier

LOGS = "/logs/verifier"
TESTS = "/tests"
_NAMES = ("reward.json", "reward.txt")
_LIMIT = OutputLimit(head_bytes=4 << 20, tail_bytes=4 << 20)


@dataclass(frozen=True, slots=True)
class RewardRun:
    """What the verifier left: rewards, or the reason why there are none and whose fault that is."""

    rewards: Rewards | None
    error: str
    by_candidate: bool
    """Without rewards: the run was cut short by a limit or a signal, which code under test can bring about."""
    findings: tuple[GradeFinding, ...]
    stdout: str
    stderr: str


async def run_verifier(box: Sandbox, verifier: Verifier, *, workdir: str, in_place: bool = False) -> RewardRun:
    """Upload the tests, run the script from the workdir, and read the reward. Its exit code is ignored.

    Raises ConfigError when the task has no script, InfraError when the room is lost or cannot be emptied.
    """
    if verifier.tests_dir is None or verifier.script is None:
        raise ConfigError("the verifier has no tests directory with a script", field="verifier")
    await discard(box, TESTS)
    await box.upload(verifier.tests_dir, TESTS)
    await _fresh_logs(box, verifier.user)
    script = f"{TESTS}/{verifier.script.relative_to(verifier.tests_dir)}"
    await place_toolkit(box)
    await place_witness(box)
    witness = Witness.new()
    async with RewardGuard(box, LOGS) as guard:
        result = await guard.beside(
            box.exec(
                [*_interpreter(verifier.script), script],
                cwd=workdir,
                env=witness.environment({**box.image.env, **box.spec.env, **verifier.env}),
                user=verifier.user,
                timeout_s=verifier.timeout_s,
                limit=_LIMIT,
                report_fd=witness.report_fd,
            )
        )
        check_started(result)
        if result.reason in (EndReason.GUEST_LOST, EndReason.EDGE_LOST, EndReason.KILLED):
            raise InfraError(f"the clean room was lost while the verifier ran ({result.reason})")
        if not in_place and await box.kill_all():
            raise InfraError("processes of the clean room survived being killed")
        findings = [*_leftovers(result), *await guard.findings()]
    run = await _read(box, verifier.tests_dir, result, findings)
    doubts = witness.doubts(result.report)
    if not doubts:
        return run
    run = replace(run, findings=(*run.findings, *doubts))
    if run.rewards is None or not run.rewards.resolved:
        return run
    return replace(run, rewards=None, error=doubts[0].detail, by_candidate=True)


async def _fresh_logs(box: Sandbox, user: str | None) -> None:
    """Empty log directories; whatever was there before, a link or a planted reward, is gone."""
    await discard(box, LOGS)
    mode = 0o755 if (user or box.image.user) in ("", "root", "0") else 0o777
    for name in (LOGS, "/logs/agent", "/logs/artifacts"):
        await box.mkdir(name, mode=mode)


def _interpreter(script: Path) -> list[str]:
    """The words of the script's `#!` line, so that no execute bit is needed."""
    first = script.read_bytes().split(b"\n", 1)[0][:200].decode("utf-8", "replace").strip()
    return first[2:].split() if first.startswith("#!") and first[2:].split() else ["/bin/sh"]


def _leftovers(result: ExecResult) -> list[GradeFinding]:
    if not result.leftover:
        return []
    return [GradeFinding("leftover", f"{result.leftover} processes outlived the verifier and were killed")]


async def _read(box: Sandbox, tests_dir: Path, result: ExecResult, findings: list[GradeFinding]) -> RewardRun:
    text, error_text = result.text, result.error_text
    refused = [finding for finding in findings if finding.kind == "reward-writer"]
    if refused:
        return RewardRun(None, refused[0].detail, True, tuple(findings), text, error_text)
    named = _named_by(tests_dir)
    found: dict[str, bytes] = {}
    problem = ""
    for name in _NAMES:
        data, odd = await _reward_bytes(box, f"{LOGS}/{name}")
        if odd:
            problem = f"{name} {odd}"
            findings.append(GradeFinding("planted-reward", problem, "review"))
        elif data is not None and name not in named:
            findings.append(GradeFinding("planted-reward", f"{name} was there, which no test file names", "review"))
        elif data is not None:
            found[name] = data
    ended = _ended_by(result)
    if ended:
        findings.append(GradeFinding("cut-short", f"the verifier was ended by {ended}", "review"))
        return RewardRun(None, f"the verifier was ended by {ended}", True, tuple(findings), text, error_text)
    if not found:
        why = problem or "the verifier left no reward file"
        return RewardRun(None, why, False, tuple(findings), text, error_text)
    try:
        rewards = parse_json(found["reward.json"]) if "reward.json" in found else parse_text(found["reward.txt"])
    except BadReward as error:
        return RewardRun(None, str(error), False, tuple(findings), text, error_text)
    return RewardRun(rewards, "", False, tuple(findings), text, error_text)


async def _reward_bytes(box: Sandbox, path: str) -> tuple[bytes | None, str]:
    """The file's bytes, or why it is not an ordinary reward file."""
    try:
        info = await box.stat(path)
    except FileError as error:
        return None, "" if error.errno == 2 else f"cannot be read ({error.errno})"
    if info.kind != "file":
        return None, f"is a {info.kind}, not a file"
    if info.size > MAX_REWARD_BYTES:
        return None, f"has {info.size} bytes"
    return await box.read(path, max_bytes=MAX_REWARD_BYTES), ""


def _named_by(tests_dir: Path) -> set[str]:
    """Which reward files the task's own tests speak of; one that none names was not written by them."""
    named: set[str] = set()
    for path in tests_dir.rglob("*"):
        if path.is_file() and path.stat().st_size <= 4 << 20:
            data = path.read_bytes()
            named |= {name for name in _NAMES if name.encode() in data}
    return named


def _ended_by(result: ExecResult) -> str:
    if result.timed_out:
        return str(EndReason.EXEC_TIMEOUT)
    if result.reason is not None:
        return str(result.reason)
    return f"signal {result.signal}" if result.signal is not None else ""


def reward_map(rewards: Rewards) -> Mapping[str, float]:
    """Rewards as they go into the grade."""
    return dict(rewards.values)
