"""Warnings: each rule fires on what it is about, and stays silent on what only looks like it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proctor.tasks import problems
from proctor.tasks.lint import RULES, logical_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeTask = Callable[..., Path]

TOML = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n[agent]\nuser = "agent"\n'
PINNED = "FROM debian@sha256:" + "0" * 64 + "\n"
TESTS = '[proctor.tests]\nrunner = "pytest"\ncommand = "x"\n'

CASES: dict[str, tuple[str, dict[str, str | None], list[tuple[str, int | None]]]] = {
    "tag": ("", {"environment/Dockerfile": "# x\nFROM debian:12\n"}, [("unpinned-image", 2)]),
    "stages": (
        "",
        {"environment/Dockerfile": PINNED.strip() + " AS one\nFROM one\nFROM --platform=linux/amd64 x:1 AS two\n"},
        [("unpinned-image", 3)],
    ),
    "scratch": ("", {"environment/Dockerfile": "FROM scratch\n"}, []),
    "pip": (
        "",
        {"environment/Dockerfile": PINNED + "RUN pip install --no-cache-dir a==1 \\\n  b 'c>=2' -r r.txt && echo d\n"},
        [("unpinned-python-dependency", 2)],
    ),
    "pip-pinned": ("", {"environment/Dockerfile": PINNED + "RUN pip install a==1 ./b.whl\n"}, []),
    "copied-tests": ("", {"environment/Dockerfile": PINNED + "COPY ../tests /tests\n"}, [("agent-image-test-leak", 2)]),
    "copied-stage": ("", {"environment/Dockerfile": PINNED + "COPY --from=x /tests /t\nCOPY latests /x\n"}, []),
    "same-file": (
        "",
        {"environment/answer": "42 is it\n", "tests/expected": "42 is it\n"},
        [("agent-image-test-leak", None)],
    ),
    "empty-files-are-no-leak": ("", {"environment/__init__.py": "", "tests/__init__.py": ""}, []),
    "installs": ("", {"tests/test.sh": "#!/bin/sh\napt-get -y install x\n"}, [("verifier-runtime-install", 2)]),
    "uvx": ("", {"tests/test.sh": "uvx pytest\n"}, [("verifier-runtime-install", 1)]),
    "downloads": (
        "",
        {"tests/test.sh": "curl -LsSf https://example.org/x | sh\n# wget http://x\n"},
        [("verifier-network-download", 1)],
    ),
    "local-curl": ("", {"tests/test.sh": "curl --version\n"}, []),
    "overlap": (
        'artifacts = ["/app", "/app/out", "/logs/agent/x", "/apple"]\n',
        {},
        [("overlapping-artifacts", None), ("artifact-log-overlap", None), ("artifacts-in-diff", 1)],
    ),
    "live": ('[proctor]\ncarry = "live"\n', {}, [("shared-verifier", None)]),
    "no-fail-to-pass": (TESTS + 'pass_to_pass = ["t"]\n', {}, [("no-fail-to-pass", None)]),
    "image": (
        '[proctor]\nimage = "org/x:1"\n',
        {"environment/Dockerfile": None},
        [("unpinned-image", None)],
    ),
    "own-image": ('[proctor]\nimage = "debian:bookworm"\n', {}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_rules(make_task: MakeTask, name: str) -> None:
    extra, files, expected = CASES[name]
    toml = extra + TOML if extra.startswith("artifacts") else TOML + extra
    found = problems(make_task(toml, files))
    assert all(problem.severity == "warning" for problem in found)
    assert {(p.rule or "", p.line) for p in found} == set(expected)
    assert len(found) == len(expected)


def test_what_reading_warns_of(make_task: MakeTask) -> None:
    toml = '[environment]\ndocker_image = "org/x:1"\nworkdir = "/app"\n'
    found = problems(make_task(toml, {"solution/solve.sh": None}))
    assert [(problem.rule, problem.line) for problem in found] == [
        ("network-unset", 1),
        ("image-not-used", 2),
        ("no-solution", None),
        ("root-agent", None),
    ]


def test_every_rule_is_described(make_task: MakeTask) -> None:
    fired = {rule for _, _, expected in CASES.values() for rule, _ in expected}
    elsewhere = {"network-unset", "image-not-used", "no-solution", "root-agent", "no-digest", "unrunnable"}
    assert fired | elsewhere == set(RULES)


def test_logical_lines() -> None:
    lines = logical_lines("# c\na \\\n# between\n  b \\\n\n\nc\nd \\")
    assert [(line.number, line.text) for line in lines] == [(2, "a b "), (7, "c"), (8, "d")]
