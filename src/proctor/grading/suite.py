"""Running a test group in a prepared room, and judging what came over the channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.common import ConfigError, InfraError
from proctor.grading import compat
from proctor.grading.channel import IN_PROCESS, prepare
from proctor.grading.command import Invocation, parse_command
from proctor.grading.junit import judge_junit
from proctor.grading.report import parse_report
from proctor.grading.room import check_started
from proctor.grading.verdict import StrictVerdict, judge
from proctor.sandbox.contract import EndReason, OutputLimit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.grading.contract import CompatVerdict
    from proctor.grading.sentinels import SentinelPlan
    from proctor.sandbox.contract import ExecResult, Sandbox
    from proctor.tasks.model import TestSpec

_LIMIT = OutputLimit(head_bytes=16 << 20, tail_bytes=4 << 20)
_LOOKUP = 'p=$(command -v -- "$1") && printf "%s\\n" "$p" && head -c 200 -- "$p" | head -n 1 | tr -d "\\000"'


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """One run: the strict verdict, the raw log for people and for compat, and how it ended."""

    verdict: StrictVerdict
    log: str
    exit_code: int | None
    timed_out: bool
    sentinels: SentinelPlan | None = None


async def run_suite(box: Sandbox, spec: TestSpec, env: Mapping[str, str], *, user: str) -> SuiteRun:
    """Run the group's command as `user` and judge it. Raises InfraError when the room is lost."""
    if spec.runner == "command":
        return await _run_commands(box, spec, env, user=user)
    if spec.runner == "junit":
        return await _run_junit(box, spec, env, user=user)
    if spec.runner not in IN_PROCESS:
        raise ConfigError(f"unknown runner {spec.runner!r}", field="proctor.tests.runner")
    invocation = parse_command(spec.command)
    log = ""
    if invocation.prelude:
        before = await _exec(box, ["/bin/sh", "-c", invocation.prelude], spec, env, user)
        log = _log(before)
    python, script = await _resolve(box, invocation, spec.cwd, env, user)
    launch = prepare(spec, invocation, python=python, script=script, env=env)
    result = await box.exec(
        list(launch.argv),
        cwd="/",
        env=launch.env,
        user=user,
        stdin=launch.stdin,
        timeout_s=spec.timeout_s,
        limit=_LIMIT,
        report_fd=launch.report_fd,
    )
    _check(result)
    report = parse_report(result.report, launch.nonce, runner=spec.runner, dropped=result.report_dropped)
    verdict = judge(
        report,
        launch.sentinels,
        runner=spec.runner,
        fail_to_pass=spec.fail_to_pass,
        pass_to_pass=spec.pass_to_pass,
        truncated_ids=spec.truncated_ids,
        ended_by=_ended_by(result),
    )
    return SuiteRun(verdict, log + _log(result), result.exit_code, result.timed_out, launch.sentinels)


def compat_verdict(spec: TestSpec, run: SuiteRun, instance_id: str | None) -> CompatVerdict | None:
    """SWE-bench's verdict on the same run, from its log alone; sentinels are taken out first."""
    if spec.compat_log_format is None:
        return None
    log_format = compat.format_for(spec.compat_log_format, instance_id)
    # Our sentinels make the exit code non-zero, so the rule for failing runs without a failed test cannot apply.
    gated = compat.gate_log(log_format, run.log, exit_code=None, timed_out=run.timed_out)
    return compat.verdict_of(gated.statuses, spec.fail_to_pass, spec.pass_to_pass, graded=gated.graded)


async def _resolve(
    box: Sandbox, invocation: Invocation, cwd: str, env: Mapping[str, str], user: str
) -> tuple[str, str | None]:
    """The interpreter, and the script's absolute path (None for `python -m`)."""
    if invocation.module is not None:
        path, _ = await _look_up(box, invocation.program, cwd, env, user)
        return path, None
    name = invocation.program
    if "/" not in name and name.endswith(".py"):
        name = f"./{name}"
    path, first = await _look_up(box, name, cwd, env, user)
    script = path if path.startswith("/") else f"{cwd.rstrip('/')}/{path.removeprefix('./')}"
    words = first[2:].split() if first.startswith("#!") else ["/usr/bin/env", "python3"]
    wanted = words[1] if words[0].endswith("/env") and len(words) > 1 else words[0]
    if "python" not in wanted.rsplit("/", 1)[-1]:
        raise ConfigError(f"{invocation.program} is not a Python program ({first!r})", field="proctor.tests.command")
    if not wanted.startswith("/"):
        wanted, _ = await _look_up(box, wanted, cwd, env, user)
    return wanted, script


async def _look_up(box: Sandbox, name: str, cwd: str, env: Mapping[str, str], user: str) -> tuple[str, str]:
    result = await box.exec(["/bin/sh", "-c", _LOOKUP, "sh", name], cwd=cwd, env=env, user=user, timeout_s=30)
    check_started(result)
    lines = result.text.splitlines()
    if not lines:
        raise ConfigError(
            f"{name} is not in the image", field="proctor.tests.command", remedy="name a program that the image has"
        )
    return lines[0], lines[1] if len(lines) > 1 else ""


async def _exec(box: Sandbox, argv: list[str], spec: TestSpec, env: Mapping[str, str], user: str) -> ExecResult:
    result = await box.exec(argv, cwd=spec.cwd, env=env, user=user, timeout_s=spec.timeout_s, limit=_LIMIT)
    _check(result)
    return result


async def _run_junit(box: Sandbox, spec: TestSpec, env: Mapping[str, str], *, user: str) -> SuiteRun:
    """Any command that leaves a JUnit file. The file is read after everything has been killed; it is weaker evidence
    than the channel, since the process that runs graded code writes it, and the verdict says so."""
    from proctor.grading.room import discard
    from proctor.sandbox.contract import FileError

    path = spec.junit_path or "/tmp/proctor-junit.xml"
    path = path if path.startswith("/") else f"{spec.cwd.rstrip('/')}/{path}"
    await discard(box, path)
    result = await _exec(box, ["/bin/sh", "-c", spec.command.replace("{junit}", path)], spec, env, user)
    await box.kill_all()
    data = b""
    try:
        if (await box.stat(path)).kind == "file":
            data = await box.read(path, max_bytes=16 << 20)
    except FileError:
        data = b""
    verdict = judge_junit(data, spec.fail_to_pass, spec.pass_to_pass, ended_by=_ended_by(result))
    return SuiteRun(verdict, _log(result), result.exit_code, result.timed_out)


async def _run_commands(box: Sandbox, spec: TestSpec, env: Mapping[str, str], *, user: str) -> SuiteRun:
    """One exec per test id (`{id}` in the command); the kernel's exit status of that process is the outcome.

    For test programs that run the deliverable as another process; never for code that imports it.
    """
    from proctor.grading.contract import TestOutcome, TestStatus
    from proctor.grading.verdict import Group

    outcomes: list[TestOutcome] = []
    log: list[str] = []
    groups: tuple[tuple[Group, tuple[str, ...]], ...] = (
        ("fail_to_pass", spec.fail_to_pass),
        ("pass_to_pass", spec.pass_to_pass),
    )
    timed_out = False
    for group, ids in groups:
        for test_id in ids:
            script = spec.command.replace("{id}", '"$1"') if "{id}" in spec.command else f'{spec.command} "$1"'
            result = await _exec(box, ["/bin/sh", "-c", script, "sh", test_id], spec, env, user)
            timed_out = timed_out or result.timed_out
            outcomes.append(
                TestOutcome(test_id, group, TestStatus.PASSED if result.ok else TestStatus.FAILED, result.ok)
            )
            log.append(f"== {test_id}: {'ok' if result.ok else 'failed'}\n{_log(result)}")
    if not outcomes:
        return SuiteRun(StrictVerdict("error", error="the task names no expected test"), "", None, False)
    verdict = StrictVerdict("resolved" if all(o.ok for o in outcomes) else "unresolved", tuple(outcomes))
    return SuiteRun(verdict, "\n".join(log), None, timed_out)


def _check(result: ExecResult) -> None:
    check_started(result)
    if result.reason in (EndReason.GUEST_LOST, EndReason.EDGE_LOST, EndReason.KILLED):
        raise InfraError(f"the clean room was lost while tests ran ({result.reason})")


def _ended_by(result: ExecResult) -> str:
    if result.timed_out:
        return str(EndReason.EXEC_TIMEOUT)
    if result.reason is not None:
        return str(result.reason)
    return f"signal {result.signal}" if result.signal is not None else ""


def _log(result: ExecResult) -> str:
    return result.text + result.error_text
