"""A candidate that is about to fail must not be able to make its grade an error: errors leave the denominator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proctor.tasks.model import Carry

from .test_rooms import PROGRAM, WRONG, attempt, edge, groups_task, image, reward_task, solve

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox import Edge
    from proctor.sandbox.contract import Image

__all__ = ["edge", "image"]
pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

SABOTAGE = {
    "logs is a file": "rm -rf /logs; echo > /logs",
    "logs is a link into itself": "rm -rf /logs; ln -s logs /logs",
    "logs leads to a device": "rm -rf /logs; ln -s /dev/null /logs",
    "home is a file": "rm -rf /home; echo > /home",
    "no accounts": "rm -f /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group",
    "another root": "echo 'root:x:1000:1000::/:/bin/sh' > /etc/passwd",
    "tmp is a file": "rm -rf /tmp; echo > /tmp",
    "opt is a file": "rm -rf /opt; echo > /opt",
    "the workdir is a file": "cd /; rm -rf /app; echo > /app",
    "the workdir is a link": "cd /; mv /app /elsewhere; ln -s /proc/self/root/nowhere /app",
    "the workdir is gone": "cd /; rm -rf /app",
    "everything is a directory": "cd /app; for f in calc.py tests/test_add.py; do rm -rf $f; mkdir -p $f/x; done",
    "the tests are a link": "cd /app; rm -rf tests; ln -s /etc tests",
    "the disk is full": "head -c 200M /dev/zero > /app/big; for i in $(seq 20000); do : > /app/f$i || break; done",
}


@pytest.mark.parametrize("sabotage", SABOTAGE)
@pytest.mark.parametrize("kind", ["filesystem", "system", "paths"])
async def test_reward_file(edge: Edge, image: Image, tmp_path: Path, sabotage: str, kind: str) -> None:
    carry = Carry("paths", paths=("/app",)) if kind == "paths" else Carry("filesystem", system=kind == "system")
    _, result = await attempt(edge, image, reward_task(tmp_path, carry), WRONG + SABOTAGE[sabotage])
    assert result.verdict == "unresolved", result


@pytest.mark.parametrize("sabotage", SABOTAGE)
async def test_live(edge: Edge, image: Image, tmp_path: Path, sabotage: str) -> None:
    _, result = await attempt(edge, image, reward_task(tmp_path, Carry("live")), WRONG + SABOTAGE[sabotage])
    assert result.verdict == "unresolved", result


@pytest.mark.parametrize("sabotage", SABOTAGE)
@pytest.mark.parametrize("kind", ["patch", "filesystem", "system"])
async def test_groups(edge: Edge, image: Image, tmp_path: Path, sabotage: str, kind: str) -> None:
    from dataclasses import replace

    task = groups_task(tmp_path, image)
    if kind != "patch":
        task = replace(task, carry=Carry("filesystem", repo="/app", system=kind == "system"))
    _, result = await attempt(edge, image, task, WRONG + SABOTAGE[sabotage], reruns=0)
    assert result.verdict == "unresolved", result


async def test_honest_work_beside_it_still_counts(edge: Edge, image: Image, tmp_path: Path) -> None:
    _, result = await attempt(edge, image, reward_task(tmp_path), PROGRAM + SABOTAGE["logs is a file"])
    assert result.verdict == "resolved", result


async def test_the_work_cannot_make_the_tester_root(edge: Edge, image: Image, tmp_path: Path) -> None:
    """Tests run without rights so that one module cannot rewrite the next; accounts may cross with `system = true`."""
    from dataclasses import replace

    task = replace(groups_task(tmp_path, image), carry=Carry("filesystem", repo="/app", system=True))
    work = solve("import os\ndef add(a, b):\n    return a + b if os.getuid() == 60123 else 0")
    _, result = await attempt(edge, image, task, work + "sed -i 1itester:x:0:0::/:/bin/sh /etc/passwd", reruns=0)
    assert result.verdict == "resolved", result


@pytest.mark.parametrize("kind", ["filesystem", "live"])
@pytest.mark.parametrize(
    "work",
    [
        "import shutil\nshutil.rmtree('/logs/verifier')\nopen('/logs/verifier', 'w')",
        "import os\nos.rename('/logs/verifier', '/logs/old')\nos.symlink('/nowhere', '/logs/verifier')",
        "import os\nopen('/tmp/fill', 'wb').write(bytes(1 << 20))\n"
        "try:\n    f = open('/fill', 'wb')\n    while True: f.write(bytes(4096)); f.flush()\nexcept OSError: pass",
    ],
    ids=["log directory is a file", "log directory leads nowhere", "disk is filled"],
)
async def test_work_that_keeps_the_verifier_from_writing(
    edge: Edge, image: Image, tmp_path: Path, kind: str, work: str
) -> None:
    task = reward_task(tmp_path, Carry("live") if kind == "live" else None)
    _, result = await attempt(edge, image, task, solve(work))
    assert result.verdict == "unresolved", result


@pytest.mark.parametrize(
    "work", ["rm /app/run.py", "echo '#!/bin/sh' > /app/run.py", "rm /app/run.py; mkdir /app/run.py"]
)
async def test_work_that_takes_the_test_command_away(edge: Edge, image: Image, tmp_path: Path, work: str) -> None:
    from dataclasses import replace

    from proctor.sandbox.contract import Layer

    (tmp_path / "more/app").mkdir(parents=True)
    (tmp_path / "more").chmod(0o755)
    (tmp_path / "more/app/run.py").write_text(
        "#!/usr/bin/env python3\nimport unittest\nunittest.main('tests.test_add')\n"
    )
    image = replace(image, layers=(*image.layers, Layer(path=tmp_path / "more")))
    task = groups_task(tmp_path, image, command="./run.py", pass_to_pass=())
    _, honest = await attempt(edge, image, task, solve())
    assert honest.verdict == "resolved", honest
    _, result = await attempt(edge, image, task, work)
    assert result.verdict == "unresolved", result


async def test_a_repository_above_the_repository_runs_nothing(edge: Edge, image: Image, tmp_path: Path) -> None:
    """Applying the test patch must not run filters that the work configured in a repository it made one level up."""
    from dataclasses import replace

    from proctor.sandbox.contract import Layer

    (tmp_path / "more/srv/x/app").mkdir(parents=True)
    for folder in ("more", "more/srv", "more/srv/x", "more/srv/x/app"):
        (tmp_path / folder).chmod(0o755)
    (tmp_path / "more/srv/x/app/note.py").write_text("a\n")
    image = replace(image, layers=(*image.layers, Layer(path=tmp_path / "more")), workdir="/srv/x/app")
    patch = tmp_path / "tests.patch"
    patch.write_text("--- a/note.py\n+++ b/note.py\n@@ -1 +1 @@\n-a\n+b\n")
    task = groups_task(tmp_path, image, cwd="/srv/x/app", patch=patch, command="python3 -m unittest tests.test_add")
    environment = replace(task.environment, workdir="/srv/x/app")
    task = replace(task, environment=environment, carry=Carry("filesystem", repo="/srv/x/app"))
    evil = "cd /srv/x; git init -q .; git config filter.e.clean 'touch /srv/x/app/ran; cat';"
    evil += " echo '* filter=e' > .gitattributes; "
    work = (
        evil
        + "echo 'import os\ndef add(a, b): return a + b if not os.path.exists(\"ran\") else 0' > /srv/x/app/calc.py"
    )
    _, result = await attempt(edge, image, task, work, reruns=0)
    assert result.verdict == "resolved", result
