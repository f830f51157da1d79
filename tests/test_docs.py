"""Every command in README.md and docs/ is run as a reader would run it.

A ```console block holds lines that begin with `$ `; they run one after another in one shell, in a folder
that has `examples` and `scripts`. A command that is meant to fail ends with `# exit N`. A block marked
```console no-run (installing system packages, a key for a real model) is read by people only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[tuple[str, int]]:
    """The commands of a page with the exit code each is expected to give."""
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.splitlines():
            if line.startswith("$ "):
                text, _, expected = line[2:].partition("# exit ")
                found.append((text.strip(), int(expected or 0)))
    return found


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize("page", [page for page in PAGES if page.exists() and commands(page)], ids=lambda p: p.stem)
def test_commands_of_the_page_work(page: Path, tmp_path: Path) -> None:
    for name in ("examples", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", TERM="dumb")
    for text, expected in commands(page):
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == expected, f"$ {text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
