"""Dated mirrors: what is newer than the cut-off, or of unknown date, does not exist; nothing else can be fetched."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proctor.common import ConfigError
from proctor.sandbox import Edge, Resources, SandboxSpec
from proctor.sandbox.net.mirror import mirror, npm_mirror, python_mirror
from proctor.sandbox.net.services import Desk, Visit, serve

from .inside import server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from starlette.requests import Request

    from proctor.sandbox.net.services import Service

pytestmark = pytest.mark.anyio

DATES = {"1.0": "2023-01-31T10:00:00Z", "2.0": "2024-02-01T00:00:01Z", "3.0": None}


def wheel(version: str) -> bytes:
    info = f"tinypkg-{version}.dist-info"
    files = {
        "tinypkg.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinypkg\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "".join(f"{name},,\n" for name in files)}.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def tarball(version: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        manifest = json.dumps({"name": "@scope/tiny", "version": version, "main": "index.js"})
        for name, text in (("package.json", manifest), ("index.js", f"module.exports = '{version}'\n")):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


WHEELS = {version: wheel(version) for version in DATES}
TARBALLS = {f"{version}.0": tarball(f"{version}.0") for version in DATES}


async def project(request: Request) -> Response:
    files = [
        {
            "filename": f"tinypkg-{version}-py3-none-any.whl",
            "url": f"../../files/tinypkg-{version}-py3-none-any.whl",
            "hashes": {"sha256": hashlib.sha256(WHEELS[version]).hexdigest()},
            **({"upload-time": moment} if moment else {}),
        }
        for version, moment in DATES.items()
    ]
    return JSONResponse({"meta": {"api-version": "1.1"}, "name": "tinypkg", "files": files})


async def package(request: Request) -> Response:
    versions = {
        version: {
            "name": "@scope/tiny",
            "version": version,
            "dist": {
                "tarball": f"http://{request.headers['host']}/npm/tiny-{version}.tgz",
                "integrity": "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode(),
            },
        }
        for version, data in TARBALLS.items()
    }
    times = {f"{version}.0": moment for version, moment in DATES.items() if moment}
    return JSONResponse({"name": "@scope/tiny", "dist-tags": {"latest": "3.0.0"}, "versions": versions, "time": times})


async def python_file(request: Request) -> Response:
    return Response(WHEELS[request.path_params["name"].split("-")[1]])


async def npm_file(request: Request) -> Response:
    return Response(TARBALLS[request.path_params["name"].removeprefix("tiny-").removesuffix(".tgz")])


UPSTREAM = Starlette(
    routes=[
        Route("/simple/tinypkg/", project),
        Route("/files/{name}", python_file),
        Route("/npm/@scope/tiny", package),
        Route("/npm/{name}", npm_file),
    ]
)


def upstream() -> Callable[[Any], Awaitable[None]]:
    """The loopback registry, served by the same bridge that serves applications to sandboxes."""
    from proctor.sandbox.net.faults import RequestFaults
    from proctor.sandbox.net.services import Service

    desk = Desk(Visit("x", "x", 80, "", 1, False), lambda _: None, RequestFaults)

    async def handler(pipe: Any) -> None:
        await serve(Service.asgi(UPSTREAM), pipe, desk)

    return handler


def client(service: Service) -> httpx.AsyncClient:
    assert service.app is not None
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=service.app), base_url="http://index.test")


async def test_a_python_index_as_it_was() -> None:
    async with server(upstream()) as where, client(python_mirror(f"http://{where}/simple/", "2024-01-31")) as index:
        page = (await index.get("/simple/tinypkg/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})).json()
        assert [file["filename"] for file in page["files"]] == ["tinypkg-1.0-py3-none-any.whl"]
        text = (await index.get("/simple/TinyPkg/")).text
        assert "tinypkg-1.0" in text
        assert "tinypkg-2.0" not in text
        assert (await index.get(page["files"][0]["url"])).content == WHEELS["1.0"]
        # Item 33: no way to fetch what the index has not named.
        for path in (
            "/files/tinypkg-2.0-py3-none-any.whl",
            "/-files/0123/x",
            "/simple/other/",
            "/simple/../files/x",
            "/",
        ):
            assert (await index.get(path)).status_code == 404


async def test_an_npm_registry_as_it_was() -> None:
    async with server(upstream()) as where, client(npm_mirror(f"http://{where}/npm/", "2024-02-01")) as registry:
        for path in ("/npm/@scope%2ftiny", "/npm/@scope/tiny"):
            found = (await registry.get(path)).json()
            assert sorted(found["versions"]) == ["1.0.0", "2.0.0"]
            assert found["dist-tags"] == {"latest": "2.0.0"}
        tar = found["versions"]["2.0.0"]["dist"]["tarball"]
        assert tar.startswith("http://index.test/-files/")
        assert (await registry.get(tar)).content == TARBALLS["2.0.0"]
        assert (await registry.get("/npm/..%2fetc")).status_code == 404
    async with server(upstream()) as where, client(npm_mirror(f"http://{where}/npm/", "2020-01-01")) as registry:
        assert (await registry.get("/npm/@scope/tiny")).status_code == 404


@pytest.mark.parametrize(
    "text", ["python", "ruby:http://a.test@2024-01-01", "npm:a.test@2024-01-01", "npm:http://a.test@soon"]
)
def test_a_wrong_mirror_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mirror(text)
    assert caught.value.field == "mirror"


@pytest.mark.sandbox
async def test_pip_and_npm_get_the_packages_of_the_time(tmp_path: Path) -> None:
    roomy = Resources(cpus=2, memory_mb=512, disk_mb=128, pids=128)
    pip = "python3 -m pip install -q --disable-pip-version-check --break-system-packages --target /tmp/lib"
    async with server(upstream()) as where, Edge(tmp_path, pool_size=1) as edge:
        services = {
            "index.test": python_mirror(f"http://{where}/simple/", "2024-01-31"),
            "npm.test": npm_mirror(f"http://{where}/npm/", "2024-01-31"),
        }
        async with await edge.create(SandboxSpec(resources=roomy), services=services) as box:
            index = "--index-url https://index.test/simple/"
            old = await box.exec(f"{pip} {index} tinypkg && cat /tmp/lib/tinypkg.py", timeout_s=60)
            assert "1.0" in old.text, old
            new = await box.exec(f"{pip} {index} tinypkg==2.0", timeout_s=60)
            assert "No matching distribution" in new.error_text
            install = (
                "cd /tmp && npm install --silent --no-audit --no-fund --registry https://npm.test/npm/ @scope/tiny"
            )
            npm = await box.exec(f"{install} && node -p 'require(\"@scope/tiny\")'", timeout_s=60)
            assert npm.text.strip() == "1.0.0", npm
            assert (await box.receipt()).network == "services"
