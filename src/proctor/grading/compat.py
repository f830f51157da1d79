"""SWE-bench's own verdict, recomputed from the raw log, to be shown beside ours.

Everything here reads text that graded code could have printed, which is exactly why it is only the `compat`
verdict: it exists so that scores can be compared with published ones. The rules are those of the public harness
(5.0.2): which statuses count, ids that a dataset cut at a space, and when a log is not graded at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proctor.common import ConfigError
from proctor.grading.contract import CompatVerdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

StatusMap = dict[str, str]
_WORDS = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
_CONTROL = {code: None for code in range(1, 32)}
_COLOUR = re.compile(r"\[(\d+)m")

APPLY_FAILED = ">>>>> Patch Apply Failed"
RESET_FAILED = ">>>>> Reset Failed"
TESTS_ERROR = ">>>>> Tests Errored"
TESTS_TIMEOUT = ">>>>> Tests Timed Out"
START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"


def _words_of(line: str) -> list[str]:
    """The words of a summary line; `FAILED id - reason` loses its dash so that the id stays second."""
    return (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()


def parse_pytest(log: str) -> StatusMap:
    """`pytest -rA` summary lines: the first word is the status, the second the id, cut at a space.

    Any line of the log counts, also one that an inner pytest run printed; the last line of an id wins.
    """
    statuses: StatusMap = {}
    for line in log.split("\n"):
        if line.startswith(_WORDS):
            words = _words_of(line)
            if len(words) > 1:
                statuses[words[1]] = words[0]
    return statuses


def parse_pytest_v2(log: str) -> StatusMap:
    """As `parse_pytest`, after colour codes and control characters are removed; old `id STATUS` lines count too."""
    statuses: StatusMap = {}
    for raw in log.split("\n"):
        line = _COLOUR.sub("", raw).translate(_CONTROL)
        if line.startswith(_WORDS):
            words = _words_of(line)
            if len(words) > 1:
                statuses[words[1]] = words[0]
        elif line.endswith(_WORDS):
            words = line.split()
            if len(words) > 1:
                statuses[words[0]] = words[1]
    return statuses


def parse_pytest_options(log: str) -> StatusMap:
    """As `parse_pytest`; a parameter that is an absolute path is shortened to `/` and its last part."""
    statuses: StatusMap = {}
    for test_id, status in parse_pytest(log).items():
        head, bracket, rest = test_id.partition("[")
        end = rest.rfind("]")
        if bracket and end >= 0:
            option = rest[:end]
            if option.startswith("/") and not option.startswith("//") and "*" not in option:
                option = "/" + option.split("/")[-1]
            statuses[f"{head}[{option}]"] = status
        else:
            statuses[test_id] = status
    return statuses


def parse_pytest_passed(log: str) -> StatusMap:
    """Lines that begin with FAILED or PASSED, or read `id PASSED …`; nothing else counts (seaborn's rule)."""
    statuses: StatusMap = {}
    for line in log.split("\n"):
        words = line.split()
        if line.startswith("FAILED"):
            if len(words) > 1:
                statuses[words[1]] = "FAILED"
        elif " PASSED " in line:
            if len(words) > 1 and words[1] == "PASSED":
                statuses[words[0]] = "PASSED"
        elif line.startswith("PASSED") and len(words) > 1:
            statuses[words[1]] = "PASSED"
    return statuses


_DJANGO_OK = (" ... ok", " ... OK", " ...  OK")
_DJANGO_SPLIT = (
    r"^(.*?)\s\.\.\.\sTesting\ against\ Django\ installed\ in\ ((?s:.*?))\ silenced\)\.\nok$",
    r"^(.*?)\s\.\.\.\sInternal\ Server\ Error:\ \/(.*)\/\nok$",
    r"^(.*?)\s\.\.\.\sSystem check identified no issues \(0 silenced\)\nok$",
)


def parse_django(log: str) -> StatusMap:
    """Verbosity-2 lines `label ... ok`, also when output stands between label and verdict.

    The label is a method with its class, or the first line of its docstring; the header of a traceback
    (`FAIL: method (class)`) adds a bare method name.
    """
    statuses: StatusMap = {}
    pending: str | None = None
    for raw in log.split("\n"):
        line = raw.strip()
        if "--version is equivalent to version" in line:
            statuses["--version is equivalent to version"] = "PASSED"
        if " ... " in line:
            pending = line.split(" ... ")[0]
        for suffix in _DJANGO_OK:
            if line.endswith(suffix):
                label = line
                if label.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                    label = label.split("...", 1)[-1].strip()
                statuses[label.rsplit(suffix, 1)[0]] = "PASSED"
                break
        _django_other(line, statuses)
        if line.startswith("ok") and pending is not None:
            statuses[pending] = "PASSED"
    for pattern in _DJANGO_SPLIT:
        for match in re.finditer(pattern, log, re.MULTILINE):
            statuses[match.group(1)] = "PASSED"
    return statuses


def _django_other(line: str, statuses: StatusMap) -> None:
    if " ... skipped" in line:
        statuses[line.split(" ... skipped")[0]] = "SKIPPED"
    for suffix, header, status in ((" ... FAIL", "FAIL:", "FAILED"), (" ... ERROR", "ERROR:", "ERROR")):
        if line.endswith(suffix):
            statuses[line.split(suffix)[0]] = status
        if line.startswith(header):
            words = line.split()
            if len(words) > 1:
                statuses[words[1].strip()] = status


_SYMPY_HEADER = re.compile(r"(_*) (.*)\.py:(.*) (_*)")


def parse_sympy(log: str) -> StatusMap:
    """`bin/test --verbose` lines `test_x ok` / `F` / `E`, and the `file.py:test` headers of tracebacks.

    The last test of a file shares its line with `[OK]` or `[FAIL]` and therefore does not count.
    """
    statuses: StatusMap = {f"{m[1]}.py:{m[2]}": "FAILED" for m in _SYMPY_HEADER.findall(log)}
    for raw in log.split("\n"):
        line = raw.strip()
        if not line.startswith("test_"):
            continue
        for suffix, status in ((" E", "ERROR"), (" F", "FAILED"), (" ok", "PASSED")):
            if line.endswith(suffix):
                statuses[line.split()[0]] = status
    return statuses


PARSERS: Mapping[str, Callable[[str], StatusMap]] = {
    "pytest-rA": parse_pytest,
    "pytest-rA-v2": parse_pytest_v2,
    "pytest-rA-options": parse_pytest_options,
    "pytest-rA-passed": parse_pytest_passed,
    "django-runtests-verbosity2": parse_django,
    "sympy-bin-test-verbose": parse_sympy,
}

_BY_REPOSITORY: Mapping[str, str] = {
    "astropy/astropy": "pytest-rA-v2",
    "mwaskom/seaborn": "pytest-rA-passed",
    "psf/requests": "pytest-rA-options",
    "pydicom/pydicom": "pytest-rA-options",
    "pylint-dev/pylint": "pytest-rA-options",
    "scikit-learn/scikit-learn": "pytest-rA-v2",
    "sphinx-doc/sphinx": "pytest-rA-v2",
}


def format_for(log_format: str, instance_id: str | None) -> str:
    """The variant of `pytest-rA` that the harness uses for an instance's repository (`owner__name-123`)."""
    if log_format != "pytest-rA" or not instance_id:
        return log_format
    return _BY_REPOSITORY.get(instance_id.rpartition("-")[0].replace("__", "/"), log_format)


def parse_log(log_format: str, log: str) -> StatusMap:
    """Status of every id that a log names, by the parser of `log_format`."""
    try:
        parser = PARSERS[log_format]
    except KeyError:
        raise ConfigError(
            f"unknown log format {log_format!r}", field="compat_log_format", remedy=f"one of {', '.join(PARSERS)}"
        ) from None
    return parser(log)


@dataclass(frozen=True, slots=True)
class GatedLog:
    """What may be graded: the part between the markers, or why nothing may."""

    graded: bool
    statuses: StatusMap
    reason: str = ""


def gate_log(log_format: str, log: str, *, exit_code: int | None, timed_out: bool = False) -> GatedLog:
    """Apply the harness' rules for a log that must not be graded (research notes, §2e).

    Markers are optional here, since our logs are taken from the run itself; when a start marker is present both
    must be, and the text between the first of each is parsed, then the whole log when that gave nothing.
    """
    if timed_out:
        return GatedLog(False, {}, "the tests timed out")
    for marker in (APPLY_FAILED, RESET_FAILED, TESTS_ERROR, TESTS_TIMEOUT):
        if marker in log:
            return GatedLog(False, {}, f"the log has the marker {marker!r}")
    text = log
    if START in log or END in log:
        start, end = log.find(START), log.find(END)
        if start < 0 or end < 0:
            return GatedLog(False, {}, "only one of the two output markers is in the log")
        text = log[start + len(START) : end]
    statuses = parse_log(log_format, text) or parse_log(log_format, log)
    if not statuses:
        return GatedLog(False, {}, "the log names no test")
    if exit_code not in (0, None) and not any(s in ("FAILED", "ERROR") for s in statuses.values()):
        return GatedLog(False, {}, f"the tests exited with {exit_code} but no test is reported as failed")
    return GatedLog(True, statuses)


def is_cut(test_id: str) -> bool:
    """True for an id whose brackets do not balance: a log parser cut it at its first space."""
    return "[" in test_id and test_id.count("[") > test_id.count("]")


def _status_of(test_id: str, statuses: Mapping[str, str], good: frozenset[str]) -> str | None:
    """Status of an expected id; a cut id matches by prefix when all candidates agree on good or not."""
    if test_id in statuses:
        return statuses[test_id]
    if not is_cut(test_id):
        return None
    found = [status for name, status in statuses.items() if name.startswith(test_id)]
    if found and len({status in good for status in found}) == 1:
        return found[0]
    return None


_F2P_GOOD = frozenset({"PASSED", "XFAIL"})
_P2P_GOOD = frozenset({"PASSED", "XFAIL", "SKIPPED"})


def verdict_of(
    statuses: Mapping[str, str],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    *,
    patch_applied: bool = True,
    graded: bool = True,
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail",
) -> CompatVerdict:
    """RESOLVED_FULL, PARTIAL or NO by the harness' table (an empty list scores 1); only FULL resolves.

    A patch that did not apply, or a log that is not graded, is never resolved; its tests are all failures.
    """
    tests: dict[str, dict[str, tuple[str, ...]]] = {}
    scores: list[float] = []
    for group, ids, good in (
        ("FAIL_TO_PASS", fail_to_pass, _F2P_GOOD),
        ("PASS_TO_PASS", pass_to_pass, _P2P_GOOD),
    ):
        success: list[str] = []
        failure: list[str] = []
        for test_id in ids:
            status = _status_of(test_id, statuses, good)
            ok = status != "FAILED" if eval_type == "fail_only" else status in good
            (success if ok and graded and patch_applied else failure).append(test_id)
        tests[group] = {"success": tuple(success), "failure": tuple(failure)}
        scores.append(len(success) / len(ids) if ids else 1.0)
    full = patch_applied and graded and scores == [1.0, 1.0]
    partial = not full and graded and patch_applied and 0 < scores[0] < 1 and scores[1] == 1
    return CompatVerdict(
        resolved=full,
        status="RESOLVED_FULL" if full else "RESOLVED_PARTIAL" if partial else "RESOLVED_NO",
        patch_applied=patch_applied,
        graded=graded,
        tests=tests,
    )


def cut_as_logs_do(test_id: str) -> str:
    """A full id as a `-rA` log parser would have cut it: up to its first space."""
    return test_id.split()[0] if test_id.split() else test_id
