"""The exam images: public tasks' test scripts work on them unedited and without a network."""

from __future__ import annotations

import pytest

from proctor import sandbox
from proctor.sandbox.contract import Resources, SandboxSpec
from proctor.sandbox.images import ImageStore, ensure_image

pytestmark = [pytest.mark.sandbox, pytest.mark.images, pytest.mark.slow, pytest.mark.anyio]

# What such scripts have in common; the installer's address is made up, only its form matters.
SCRIPT = """
apt-get update
apt-get install -y curl
curl -LsSf https://example.invalid/uv/0.9.7/install.sh | sh
. $HOME/.local/bin/env
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 {more} \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_it.py -rA
"""
TEST = b"""
import sys

def test_version():
    assert sys.version_info[:2] == (3, 13)
"""
PANDAS = (
    TEST
    + b"""
def test_pandas():
    import pandas
    import pyarrow
    assert len(pandas.DataFrame({"a": [1, 2]}).to_parquet()) > 0 and pyarrow.__version__ == "22.0.0"
"""
)
VERSIONS = {"exam:base": "python3.13 3.13", "exam:python3.11": "python 3.11", "exam:python3.13": "python 3.13"}


@pytest.mark.parametrize("ref", VERSIONS)
@pytest.mark.parametrize("pandas", [False, True])
async def test_uvx_runs_pytest_without_a_network(ref: str, pandas: bool) -> None:
    image = await ensure_image(ref, store=ImageStore())
    async with sandbox.create(SandboxSpec(image=image, resources=Resources(memory_mb=2048))) as box:
        await box.write("/tests/test_it.py", PANDAS if pandas else TEST)
        more = "-w pandas==2.3.3 -w pyarrow==22.0.0" if pandas else ""
        result = await box.exec(SCRIPT.format(more=more), cwd="/app", timeout_s=120)
        assert result.exit_code == 0, result.text + result.error_text
        assert f"{2 if pandas else 1} passed" in result.text
        assert (await box.stat("/logs/verifier/ctrf.json")).size > 0


@pytest.mark.parametrize("ref", VERSIONS)
async def test_python_and_pip_are_the_ones_that_the_name_promises(ref: str) -> None:
    program, version = VERSIONS[ref].split()
    image = await ensure_image(ref, store=ImageStore())
    async with sandbox.create(SandboxSpec(image=image)) as box:
        for command in (program, f"{program} -m venv --without-pip /tmp/v && /tmp/v/bin/python"):
            result = await box.exec(f"{command} -c 'import ssl, sqlite3, sys; print(*sys.version_info[:2], sep=\".\")'")
            assert result.text == f"{version}\n", result.error_text
        if program == "python":
            assert f"(python {version})" in (await box.exec("pip --version")).text
        refused = await box.exec("pip install requests", timeout_s=60)
        assert "No matching distribution" in refused.error_text


async def test_a_curl_that_is_not_for_the_installer_is_not_answered() -> None:
    image = await ensure_image("exam:base", store=ImageStore())
    async with sandbox.create(SandboxSpec(image=image)) as box:
        assert (await box.exec("curl https://example.invalid/other.sh")).exit_code == 127
