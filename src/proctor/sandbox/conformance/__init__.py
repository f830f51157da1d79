"""The conformance suite: what every runtime has to do, as checks that run against a real one.

`proctor doctor --conformance` and tests/conformance run the same list. A check makes sandboxes of one runtime and
raises `Failure` when they do not behave as the contract says; what a runtime declares that it cannot do is skipped.

    async for outcome in run_checks("native"):
        print(outcome.check, outcome.status, outcome.detail)
"""

from __future__ import annotations

from proctor.sandbox.conformance.checks import Check, Failure, Outcome, Subject, all_checks, run_all, run_checks

__all__ = ["Check", "Failure", "Outcome", "Subject", "all_checks", "run_all", "run_checks"]
