"""Dockerfiles: bases are found and replaced, buildah builds, only new layers come back, the environment is right."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor import sandbox
from proctor.common import ConfigError
from proctor.sandbox.contract import Image, ImageError, SandboxSpec
from proctor.sandbox.images import ImageStore, assets, build_dockerfile, ensure_image
from proctor.sandbox.images.dockerfile import base_uses, final_env, find_base, forget_builds, replace_bases


def names(text: str) -> list[str]:
    return [use.name for use in base_uses(text)]


def test_every_image_that_is_used_is_found() -> None:
    text = """
# FROM commented:1
ARG VERSION=3.13
ARG OTHER
FROM --platform=linux/amd64 python:${VERSION}-slim AS build
RUN echo FROM inner:1
FROM scratch
FROM build AS second
FROM ubuntu:24.04
COPY --from=build /a /a
COPY --chown=1:1 --from=busybox:1 /b /b
COPY --from=0 /c /c
from debian:${OTHER:-bookworm} as Last
"""
    assert names(text) == ["python:3.13-slim", "ubuntu:24.04", "busybox:1", "debian:bookworm"]


@pytest.mark.parametrize(
    ("text", "words"), [("RUN x", "no FROM"), ("FROM", "cannot be read"), ("FROM a b c d", "cannot be")]
)
def test_a_dockerfile_without_a_proper_from_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        base_uses(text)


def test_only_the_names_are_replaced() -> None:
    text = "FROM  ubuntu:24.04  AS x\nCOPY --from=busybox:1 a \\\n  b\nRUN echo ubuntu:24.04"
    replaced = replace_bases(text, base_uses(text), {"ubuntu:24.04": "local/u", "busybox:1": "local/b"})
    assert replaced == "FROM  local/u  AS x\nCOPY --from=local/b a \\\n  b\nRUN echo ubuntu:24.04"


@given(st.lists(st.sampled_from(["RUN a", "# x", "", "COPY . .", "ENV A=1", "FROM scratch"]), max_size=8))
def test_a_dockerfile_without_outside_images_stays_byte_for_byte(lines: list[str]) -> None:
    text = "\n".join(["FROM scratch", *lines])
    assert replace_bases(text, base_uses(text), {}) == text


TABLE = {
    "ubuntu:24.04": "exam:base",
    "ubuntu:22.04": "exam:base",
    "docker.io/library/ubuntu:24.04": "exam:base",
    "debian:bookworm-slim": "debian:bookworm",
    "debian:bullseye": "debian:bullseye",
    "python:3.11-slim": "exam:python3.11",
    "python:3.11-slim-bookworm": "exam:python3.11",
    "python:3.13-slim-bookworm": "exam:python3.13",
    "python:3.13-slim-bookworm@sha256:" + "0" * 64: "exam:python3.13",
    "ubuntu": "exam:base",
    "python:2.7": None,
    "python:3.9-slim": None,
    "alpine:3.19": None,
    "ghcr.example/ubuntu:24.04": None,
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_bases(name: str) -> None:
    assert assets.base_for(name) == TABLE[name]


def test_every_image_of_the_table_can_be_built() -> None:
    known = {f"debian:{release}" for release in ("bookworm", "bullseye", "trixie")} | set(assets.recipe_refs())
    assert {image for image in TABLE.values() if image} <= known


def image_with(env: dict[str, str], held_back: str = "") -> Image:
    return Image("x", "sha256:" + "0" * 64, (), env=env, labels={"env.run": held_back} if held_back else {})


def test_build_variables_go_and_what_the_dockerfile_set_stays() -> None:
    base = image_with({"PATH": "/bin", "CERT": "/base.pem", "OFFLINE": "1"}, held_back="OFFLINE")
    extra = {"CERT": "/build.pem", "PROXY": "http://p", "CACHE": "off"}
    built = {"PATH": "/app:/bin", "CERT": "/build.pem", "PROXY": "http://p", "CACHE": "mine", "NEW": "1"}
    assert final_env(built, extra, base) == {
        "PATH": "/app:/bin", "CERT": "/base.pem", "CACHE": "mine", "NEW": "1", "OFFLINE": "1",
    }  # fmt: skip


def test_a_dockerfile_may_set_a_held_back_variable_itself() -> None:
    assert final_env({"OFFLINE": "0"}, {}, image_with({"OFFLINE": "1"}, held_back="OFFLINE"))["OFFLINE"] == "0"


@pytest.mark.anyio
async def test_a_base_that_nothing_stands_for_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"no local image stands for .* alpine:3\.19.*proctor image import"):
        await find_base("alpine:3.19", store=ImageStore(tmp_path), pull="never")


def write_context(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def running(mark: str) -> bool:
    """True while a process has `mark` among its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


BUILDS = [
    pytest.mark.sandbox,
    pytest.mark.images,
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("buildah") is None, reason="buildah is not installed"),
]


class TestBuilds:
    """With buildah, on Debian bookworm from the machine's own store."""

    pytestmark = BUILDS

    @pytest.fixture
    async def store(self) -> ImageStore:
        store = ImageStore()
        await ensure_image("debian:bookworm", store=store)
        return store

    async def build(self, store: ImageStore, folder: Path, text: str, **files: str) -> Image:
        write_context(folder, {"Dockerfile": text, **files})
        return await build_dockerfile(folder, store=store, pull="never")

    async def test_a_dockerfile_becomes_an_image(self, store: ImageStore, tmp_path: Path) -> None:
        text = """FROM debian:bookworm
WORKDIR /app
ENV GREETING=hello PATH=/app/bin:$PATH
COPY data /app/data
RUN rm -rf /usr/share/doc/git && id -u > who && test -n "$SSL_CERT_FILE"
USER nobody
"""
        image = await self.build(store, tmp_path / "env", text, data="42")
        assert image.layers[0] == store.resolve("debian:bookworm").layers[0]
        assert (image.workdir, image.user) == ("/app", "nobody")
        assert "SSL_CERT_FILE" not in image.env
        async with sandbox.create(SandboxSpec(image=image)) as box:
            result = await box.exec("id -un; pwd; echo $GREETING $PATH; cat data who; ls /usr/share/doc | grep -x git")
            path = "/app/bin:" + store.resolve("debian:bookworm").env["PATH"]
            assert result.text.split("\n") == ["nobody", "/app", f"hello {path}", "420", ""]
            assert (await box.exec("find /run /tmp -mindepth 1")).text == ""

    async def test_the_same_files_are_built_once(self, store: ImageStore, tmp_path: Path) -> None:
        text = "FROM debian:bookworm\nRUN date +%N > /when\n"
        first = await self.build(store, tmp_path / "env", text)
        shutil.copytree(tmp_path / "env", tmp_path / "copy")
        assert (await self.build(store, tmp_path / "copy", text)).digest == first.digest

    async def test_stages(self, store: ImageStore, tmp_path: Path) -> None:
        text = """FROM debian:bookworm AS build
RUN echo made > /artifact
FROM debian:bookworm
COPY --from=build /artifact /artifact
"""
        image = await self.build(store, tmp_path / "env", text)
        assert (image.layers[-1].path / "artifact").read_text() == "made\n"
        assert len(image.layers) == 2

    async def test_a_build_that_fails_is_one_clear_error(self, store: ImageStore, tmp_path: Path) -> None:
        with pytest.raises(ImageError, match=r"building .*Dockerfile failed.*exit status 9") as caught:
            await self.build(store, tmp_path / "env", "FROM debian:bookworm\nRUN exit 9\n")
        assert "\n" not in str(caught.value)

    async def test_a_build_that_takes_too_long_is_stopped(self, store: ImageStore, tmp_path: Path) -> None:
        mark = f"600.{os.getpid()}"
        (tmp_path / "Dockerfile").write_text(f"FROM debian:bookworm\nRUN (setsid sleep {mark} &) ; sleep {mark}\n")
        with pytest.raises(ImageError, match="took longer than 5"):
            await build_dockerfile(tmp_path, store=store, pull="never", timeout_s=5)
        with anyio.fail_after(5):
            while running(mark):  # noqa: ASYNC110 - another program's processes have no event
                await anyio.sleep(0.05)

    async def test_a_build_leaves_no_mount(self, store: ImageStore, tmp_path: Path) -> None:
        with pytest.raises(ImageError):
            await self.build(store, tmp_path / "env", "FROM debian:bookworm\nRUN exit 9\n")
        assert str(store.root / "buildah") not in Path("/proc/self/mounts").read_text()  # noqa: ASYNC240

    async def test_builds_can_be_forgotten(self, tmp_path: Path) -> None:
        store = ImageStore(tmp_path / "images")
        (store.root / "cache").mkdir(parents=True)
        forget_builds(store)
        assert not (store.root / "cache").exists()
