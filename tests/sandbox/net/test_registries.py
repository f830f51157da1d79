"""The registries that this machine's own pip and apt use, from inside: no name of one is written here."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import anyio.to_thread
import pytest

from proctor.sandbox import Edge, Resources, SandboxSpec
from proctor.sandbox.net import NetworkPolicy, Rule
from proctor.sandbox.net.addresses import refusal

from .test_programs import APT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox, pytest.mark.slow]

PACKAGE = "six"
ROOMY = Resources(cpus=2, memory_mb=1024, disk_mb=512, pids=256)


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=1) as made:
        yield made


def rule_for(url: str) -> Rule:
    """A rule for a registry; internal where this machine reaches it at an address that is not public."""
    import ipaddress

    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        with socket.create_connection((host, port), timeout=10):
            pass
    except OSError as error:
        pytest.skip(f"{host} is not reached from here: {error}")
    internal = any(refusal(ipaddress.ip_address(address)) is not None for address in found)
    return Rule(host, (port,), internal=internal)


def python_index() -> str:
    """What pip is configured with, else what it brings along."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    config = subprocess.run(command, capture_output=True, text=True, check=False)
    if config.returncode == 0:
        return config.stdout.strip()
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)


def fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=20) as page:
            return str(page.read().decode())
    except OSError as error:
        pytest.skip(f"the index does not answer: {error}")


def debian_source() -> str:
    """The first source of packages of apt, as one line."""
    for path in sorted(Path("/etc/apt").glob("sources.list.d/*.sources")):
        fields = dict(re.findall(r"^([A-Za-z-]+): *(.+)$", path.read_text().partition("\n\n")[0], re.MULTILINE))
        if {"URIs", "Suites", "Components", "Signed-By"} <= fields.keys() and fields["Signed-By"].startswith("/usr/"):
            signed, suite = fields["Signed-By"], fields["Suites"].split()[0]
            return f"deb [signed-by={signed}] {fields['URIs'].split()[0]} {suite} {fields['Components']}"
    for line in (
        Path("/etc/apt/sources.list").read_text().splitlines() if Path("/etc/apt/sources.list").exists() else []
    ):
        if line.startswith("deb http"):
            return line
    pytest.skip("apt has no source here whose key is below /usr")


async def test_pip_install_from_the_machines_index(edge: Edge) -> None:
    index = python_index()
    page_rule = rule_for(index)
    page_url = urljoin(index.rstrip("/") + "/", f"{PACKAGE}/")
    link = re.search(r'href="([^"]+)"', await anyio.to_thread.run_sync(fetch, page_url))
    assert link is not None
    policy = NetworkPolicy("allow", tuple({page_rule, rule_for(urljoin(page_url, link[1]))}))
    async with await edge.create(SandboxSpec(network=policy, resources=ROOMY)) as box:
        install = f"python3 -m pip install -q --no-cache-dir --target /tmp/lib --index-url {index} {PACKAGE}"
        result = await box.exec(
            f"{install} && PYTHONPATH=/tmp/lib python3 -c 'import six; print(six.__version__)'", timeout_s=180
        )
        assert result.ok, result
        assert re.match(r"\d+\.\d+", result.text)
        used = {event.name for event in box.network_events if event.kind == "connection"}
        assert used == {rule.host for rule in policy.rules}


async def test_apt_get_update_from_the_machines_mirror(edge: Edge) -> None:
    source = debian_source()
    url = next(word for word in source.split() if word.startswith("http"))
    policy = NetworkPolicy("allow", (rule_for(url),))
    async with await edge.create(SandboxSpec(network=policy, resources=ROOMY)) as box:
        setup, _, _ = APT.partition(" && apt-get")
        prepare = setup.replace("'deb [trusted=yes] {url} stable main'", f"'{source}'")
        result = await box.exec(f"{prepare} && apt-get -o APT::Sandbox::User=root update", timeout_s=300)
        assert result.ok, result
        assert "Get:1" in result.text
        assert "Err:" not in result.text
        assert (await box.exec("apt-cache show bash | head -1", timeout_s=60)).text.strip() == "Package: bash"
