"""Ordinary programs, unchanged and without proxy variables, through a carried network: TLS passed through untouched,
and TLS that ends at the boundary because a rule has to read requests."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import ProctorError
from proctor.sandbox import Edge, Resources, Runtime, SandboxSpec
from proctor.sandbox.net import NetworkPolicy, Rule
from proctor.sandbox.net.authority import Authority

from . import site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

ROOMY = Resources(cpus=2, memory_mb=1024, disk_mb=256, pids=256)
APT = (
    "mkdir -p /etc/apt/apt.conf.d /var/lib/apt/lists/partial /var/cache/apt/archives/partial /var/lib/dpkg /var/log/apt"
    " && touch /var/lib/dpkg/status && echo 'deb [trusted=yes] {url} stable main' > /etc/apt/sources.list"
    " && apt-get -o APT::Sandbox::User=root -o Acquire::Retries=0 update && apt-cache show tinydeb"
)
PROGRAMS = {
    "curl": ("curl -sS https://pkgs.test/file.txt", "a file"),
    "curl-http": ("curl -sS http://pkgs.test/file.txt", "a file"),
    "wget": ("wget -qO- https://pkgs.test/file.txt", "a file"),
    "git": ("git clone -q https://pkgs.test/repo.git /tmp/repo && cat /tmp/repo/readme", "from git"),
    "pip": (
        "python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --break-system-packages"
        " --index-url https://pkgs.test/simple/ --target /tmp/lib tinypkg"
        " && PYTHONPATH=/tmp/lib python3 -c 'import tinypkg; print(tinypkg.answer)'",
        "42",
    ),
    "npm": (
        "cd /tmp && npm install --silent --no-audit --no-fund --registry https://pkgs.test/npm/ tinynpm"
        " && node -p 'require(\"tinynpm\")'",
        "42",
    ),
    "apt": (APT.format(url="http://pkgs.test/debian"), "Package: tinydeb"),
    "apt-tls": (APT.format(url="https://pkgs.test/debian"), "Package: tinydeb"),
    "urllib": (
        "python3 -c 'import urllib.request as u; print(u.urlopen(\"https://pkgs.test/file.txt\").read().decode())'",
        "a file",
    ),
    "requests": (
        "python3 -c 'from pip._vendor import requests as r; print(r.get(\"https://pkgs.test/file.txt\").text)'",
        "a file",
    ),
    "node": ("node -e 'fetch(\"https://pkgs.test/file.txt\").then(r => r.text()).then(console.log)'", "a file"),
    "go": ("kubectl --server https://pkgs.test --token t --request-timeout 10s version", "v1.42.0"),
    "static": ("busybox wget -qO- http://pkgs.test/file.txt", "a file"),
}
NEEDS = {"go": "kubectl", "static": "busybox", "npm": "npm", "node": "node", "git": "git", "wget": "wget"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site.build(tmp_path_factory.mktemp("site"))


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=1) as made:
        yield made


@pytest.mark.parametrize(
    ("runtime", "reads"), [("native", False), ("native", True), pytest.param("runsc", True, marks=pytest.mark.slow)]
)
async def test_programs_work_as_they_are(edge: Edge, pages: Path, runtime: Runtime, reads: bool) -> None:
    """With TLS untouched, and (`reads`) ended at the boundary."""
    try:
        await edge.ready(runtime)
    except ProctorError as error:
        pytest.skip(f"runtime {runtime}: {error.message}")
    upstream = Authority("the site's")
    with site.serving(pages, upstream.context("pkgs.test")) as tls, site.serving(pages) as plain:
        methods = ("GET", "HEAD") if reads else None
        rules = (
            Rule("pkgs.test", (443,), methods=methods, internal=True, target=tls),
            Rule("pkgs.test", (80,), methods=methods, internal=True, target=plain),
        )
        policy = NetworkPolicy("allow", rules, upstream.pem)
        async with await edge.create(SandboxSpec(runtime=runtime, network=policy, resources=ROOMY)) as box:
            failures = {}

            async def try_one(name: str) -> None:
                command, expected = PROGRAMS[name]
                result = await box.exec(command, timeout_s=120)
                if expected not in result.text:
                    failures[name] = (result.exit_code, result.text[-500:], result.error_text[-500:])

            async def try_some(*names: str) -> None:
                for name in names:
                    if shutil.which(NEEDS.get(name, "curl")):
                        await try_one(name)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(try_some, "apt", "apt-tls", "pip")  # apt keeps a lock
                tasks.start_soon(try_some, *(name for name in PROGRAMS if name not in ("apt", "apt-tls", "pip")))
            assert not failures
            assert {event.terminated for event in box.network_events if event.sni} == {reads}
            variables = await box.exec("env")
            assert "proxy" not in variables.text.lower()
