"""Signals in a trial that need no model: rules over what the host recorded, each with its evidence.

A rule says what can be observed and never why. `fact`: the record shows it. `heuristic`: it is read out of names, texts
or commands, and may be wrong. Those about the course of a trial are in `proctor.analysis.course`.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from proctor.analysis import course
from proctor.analysis.observed import Pointer, Signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from proctor.analysis.behaviour import Action
    from proctor.analysis.observed import Observed

CONSECUTIVE, IN_ALL = 3, 5
"""So many exact repeats in a row, or in all, are a loop."""
STUCK_ROUNDS = 4
"""So many rounds of edit and check with the same answer are being stuck."""
_POINTERS = 3
_INVALID = ("unknown_tool", "invalid_json", "invalid_arguments")
_CLAIMS_CHECK = re.compile(
    r"\b(?:all|the)\s+(?:\w+\s+){0,2}tests?\s+(?:now\s+)?(?:pass|are passing|succeed)|tests? pass(?:es|ed)?\b|"
    r"\bI (?:have )?(?:ran|verified|tested|checked)\b",
    re.IGNORECASE,
)
_CLAIMS_FILE = re.compile(
    r"\b(?:wrote|created|saved|added|written to|saved to)\b[^.\n]{0,60}?(/[\w./-]*\w)", re.IGNORECASE
)
_REFUSES = re.compile(
    r"\bI(?:'m| am)? (?:can(?:no|')t|cannot|unable to|not able to|won't|will not) "
    r"(?:help|assist|comply|do (?:this|that)|complete|continue)",
    re.IGNORECASE,
)


def signals(seen: Observed) -> tuple[Signal, ...]:
    """Every signal of a trial, in the order of RULES."""
    return tuple(signal for rule in RULES for signal in rule(seen))


def host_fault(seen: Observed) -> Iterator[Signal]:
    """The machinery failed: no score, and nobody's fault but ours."""
    if seen.outcome == "infra_error":
        yield Signal(
            "host fault",
            "fact",
            seen.stop,
            f"the machinery failed: {seen.detail or seen.stop}",
            _result("stop", seen.stop),
        )


def tool_fault(seen: Observed) -> Iterator[Signal]:
    """The examiner, or a tool of the harness, failed by itself."""
    if seen.outcome == "verifier_error":
        yield Signal(
            "verifier fault",
            "fact",
            seen.grade_error,
            f"the verifier gave no verdict: {seen.grade_error}",
            (Pointer("grade.json", "/error", seen.grade_error[:80]),),
        )
    broken = [place for place, error in seen.call_errors.items() if error.startswith("sandbox:")]
    if broken:
        yield Signal(
            "tool fault", "fact", len(broken), f"{len(broken)} calls of tools failed by the sandbox", _places(broken)
        )
    if seen.model_errors:
        yield Signal(
            "model errors",
            "fact",
            seen.model_errors,
            f"{seen.model_errors} calls of the model failed for good",
            _result("model_errors", str(seen.model_errors)),
        )


def injected_fault(seen: Observed) -> Iterator[Signal]:
    """Calls were made to go wrong on purpose: neither the agent's mistake nor the machinery's."""
    if seen.injected:
        kinds = ", ".join(sorted(set(seen.injected.values())))
        yield Signal(
            "injected fault",
            "fact",
            len(seen.injected),
            f"{len(seen.injected)} calls or connections were made to go wrong on purpose ({kinds})",
            _places(list(seen.injected)),
        )


def budget_end(seen: Observed) -> Iterator[Signal]:
    """A limit of the trial ended it."""
    if seen.stop.startswith("limit:"):
        limit = seen.stop.partition(":")[2]
        yield Signal("budget end", "fact", limit, f"the limit on {limit} ended it", _result("stop", seen.stop))


def gave_up(seen: Observed) -> Iterator[Signal]:
    """The harness said so, or broke down."""
    if seen.stop in ("gave_up", "error"):
        text = "the harness gave up" if seen.stop == "gave_up" else "the harness broke down"
        yield Signal(
            text.removeprefix("the harness "), "fact", seen.stop, f"{text}: {seen.detail}", _result("stop", seen.stop)
        )


def missing_deliverable(seen: Observed) -> Iterator[Signal]:
    """There was nothing to grade: absent, empty, or it could not be taken."""
    for number, finding in enumerate(seen.findings):
        if finding.kind == "not-run":
            yield Signal(
                "missing deliverable",
                "fact",
                finding.detail,
                f"nothing could be graded: {finding.detail}",
                (Pointer("findings.json", f"/findings/{number}/detail", finding.detail[:80]),),
            )


def no_attempt(seen: Observed) -> Iterator[Signal]:
    """Nothing on the disk is different at the end."""
    if seen.changed == ():
        yield Signal(
            "no attempt", "fact", 0, "it ended with nothing changed on disk", (Pointer("diff.json", "/entries"),)
        )


def target_tests(seen: Observed) -> Iterator[Signal]:
    """Which of the target tests pass, and whether what passed before is broken."""
    target, kept = seen.group("fail_to_pass"), seen.group("pass_to_pass")
    broken = [index for index, test in enumerate(seen.tests) if test.group == "pass_to_pass" and not test.ok]
    if broken:
        good = bool(target) and all(test.ok for test in target)
        text = f"{len(broken)} of {len(kept)} tests that passed before fail"
        yield Signal(
            "regression broken",
            "fact",
            len(broken),
            f"{text}{', though every target test passes' if good else ''}",
            _tests(seen, broken),
        )
    passed = sum(test.ok for test in target)
    if 0 < passed < len(target):
        failing = [index for index, test in enumerate(seen.tests) if test.group == "fail_to_pass" and not test.ok]
        yield Signal(
            "partial target",
            "fact",
            passed / len(target),
            f"{len(target) - passed} of {len(target)} target tests fail",
            _tests(seen, failing),
        )
    unstable = [index for index, test in enumerate(seen.tests) if test.unstable]
    if unstable:
        yield Signal(
            "unstable tests",
            "fact",
            len(unstable),
            f"{len(unstable)} tests gave more than one result",
            _tests(seen, unstable),
        )


def constraint_broken(seen: Observed) -> Iterator[Signal]:
    """Something was done that the rules forbid."""
    for number, finding in enumerate(seen.findings):
        if finding.severity == "disqualify":
            yield Signal(
                "constraint broken",
                "fact",
                finding.kind,
                f"{finding.kind}: {finding.detail}",
                (Pointer("findings.json", f"/findings/{number}/detail", finding.detail[:80]),),
            )


def claims(seen: Observed) -> Iterator[Signal]:
    """The last message claims a check that nothing on record made, or a file that is not there."""
    said = _CLAIMS_CHECK.search(seen.final_message)
    everything = (*seen.behaviour.actions, *seen.logged)
    if said and not any(action.checked or action.kind == "verify" for action in everything):
        yield Signal(
            "claim without event",
            "heuristic",
            said.group(),
            f"it says {said.group()!r}, and nothing was run or checked",
            (Pointer("result.json", "/final_message", said.group()),),
        )
    for match in _CLAIMS_FILE.finditer(seen.final_message):
        path = match.group(1)
        if seen.changed is not None and not any(f"/{one.lstrip('/')}" == path for one in seen.changed):
            yield Signal(
                "claim without event",
                "heuristic",
                path,
                f"it says that it wrote {path}, which has not changed",
                (Pointer("result.json", "/final_message", match.group()), Pointer("diff.json", "/entries")),
            )


def repeats(seen: Observed) -> Iterator[Signal]:
    """The same call with the same answer, again and again."""
    actions = seen.behaviour.actions
    again = seen.behaviour.repeats()
    longest = max((len(list(run)) for _, run in groupby(actions, key=lambda one: (one.call, one.result))), default=0)
    if longest >= CONSECUTIVE or len(again) >= IN_ALL:
        tools = sorted({action.tool for action in again})
        yield Signal(
            "identical repeat",
            "fact",
            len(again),
            f"{len(again)} of {len(actions)} calls ask again what was answered ({', '.join(tools)})",
            _places([action.evidence for action in again]),
        )


def unhandled_error(seen: Observed) -> Iterator[Signal]:
    """A call that failed is made again unchanged, at once."""
    actions = seen.behaviour.actions
    found = [
        later
        for former, later in pairwise(actions)
        if former.failed and later.failed and former.call == later.call and not (former.injected or later.injected)
    ]
    if found:
        yield Signal(
            "unhandled error",
            "fact",
            len(found),
            f"{len(found)} failed calls were made again unchanged",
            _places([action.evidence for action in found]),
        )


def invalid_calls(seen: Observed) -> Iterator[Signal]:
    """Calls that no tool could take."""
    found = [place for place, error in seen.call_errors.items() if error.startswith(_INVALID)]
    if found:
        share = len(found) / max(1, len(seen.behaviour.actions))
        yield Signal(
            "invalid calls",
            "fact",
            share,
            f"{len(found)} calls had no such tool, or arguments it cannot take",
            _places(found),
        )


def edit_test_loop(seen: Observed) -> Iterator[Signal]:
    """Edit and check in turn, and the check always answers the same failure."""
    rounds: list[Action] = []
    longest: list[Action] = []
    edited = False
    for action in seen.behaviour.actions:
        if action.kind == "verify" and not action.injected:
            if action.failed and edited and (not rounds or rounds[-1].result == action.result):
                rounds.append(action)
            else:
                rounds = [action] if action.failed and edited else []
            edited = False
            longest = max(longest, list(rounds), key=len)
        elif action.kind == "write":
            edited = True
    if len(longest) >= STUCK_ROUNDS:
        yield Signal(
            "edit-test loop",
            "heuristic",
            len(longest),
            f"{len(longest)} rounds of edit and check with the same failure",
            _places([action.evidence for action in longest]),
        )


def no_verification(seen: Observed) -> Iterator[Signal]:
    """It wrote, and then ran nothing."""
    count = seen.behaviour.unverified_edits
    if count:
        writes = [action.evidence for action in seen.behaviour.actions if action.kind == "write"]
        yield Signal(
            "no verification",
            "heuristic",
            count,
            f"{count} writes after which nothing was run or checked",
            _places(writes[-count:]),
        )


def refusal(seen: Observed) -> Iterator[Signal]:
    """It said no and did nothing."""
    said = _REFUSES.search(seen.final_message)
    if said and not any(action.kind in ("write", "run", "verify") for action in seen.behaviour.actions):
        yield Signal(
            "refusal",
            "heuristic",
            said.group(),
            "it declined and wrote nothing",
            (Pointer("result.json", "/final_message", said.group()),),
        )


RULES: Sequence[Callable[[Observed], Iterator[Signal]]] = (
    host_fault,
    tool_fault,
    injected_fault,
    budget_end,
    gave_up,
    missing_deliverable,
    no_attempt,
    constraint_broken,
    claims,
    target_tests,
    repeats,
    unhandled_error,
    invalid_calls,
    edit_test_loop,
    no_verification,
    refusal,
    *course.RULES,
)
"""Every rule, in the order in which its signals are listed."""


def _result(name: str, value: str) -> tuple[Pointer, ...]:
    return (Pointer("result.json", f"/{name}", value),)


def _places(evidence: Sequence[str]) -> tuple[Pointer, ...]:
    return tuple(Pointer.parse(place) for place in evidence[:_POINTERS])


def _tests(seen: Observed, indexes: Sequence[int]) -> tuple[Pointer, ...]:
    return tuple(Pointer("grade.json", f"/tests/{index}", seen.tests[index].test_id) for index in indexes[:_POINTERS])
