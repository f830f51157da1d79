"""Importers, by real round trips: what skopeo and buildah write from our own root file system comes back the same."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import stat
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox.contract import Image, ImageError
from proctor.sandbox.images import ImageStore, export_layout, import_image, tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.sandbox, pytest.mark.anyio]

needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A root file system with everything that is easily lost."""
    root = tmp_path / "rootfs"
    for name in ("usr/bin", "etc", "dev", "var/empty", "opt/odd"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "usr/bin/su").write_bytes(b"\x7fELF su")
    (root / "usr/bin/su").chmod(0o4755)
    os.link(root / "usr/bin/su", root / "usr/bin/su2")
    (root / "etc/shadow").write_text("root:*:1::::::\n")
    os.chown(root / "etc/shadow", 0, 42)
    (root / "etc/shadow").chmod(0o640)
    os.symlink("/nowhere", root / "opt/odd/dangling")
    (root / os.fsdecode(b"opt/odd/caf\xe9\n")).write_text("x")
    os.mknod(root / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(root / "opt/odd/fifo")
    (root / "var/empty").chmod(0o1777)
    return root


@pytest.fixture
async def image(store: ImageStore, rootfs: Path) -> Image:
    """Two layers: the root file system, and one that changes, adds, deletes and hides."""
    base = await import_image(rootfs, ref="base:1", store=store)
    with store.workspace() as workspace:
        upper = workspace.directory("upper")
        (upper / "etc").mkdir()
        (upper / "etc/motd").write_text("hello")
        os.mknod(upper / "etc/shadow", stat.S_IFCHR, 0)
        (upper / "opt/odd").mkdir(parents=True)
        os.setxattr(upper / "opt/odd", tree.OPAQUE, b"y")
        (upper / "opt/odd/only").write_text("1")
        layer = workspace.commit(upper)
        env = {"PATH": "/usr/bin", "A": "b=c"}
        return store.put("two:1", [*base.layers, layer], env=env, workdir="/opt", user="1000:1000")


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def skopeo(*arguments: object) -> None:
    run(["skopeo", *map(str, arguments)])


def layout_of(image: Image, tmp_path: Path) -> Path:
    layout = tmp_path / "layout"
    export_layout(image, layout)
    return layout


def assert_same(found: Image, wanted: Image) -> None:
    assert [layer.digest for layer in found.layers] == [layer.digest for layer in wanted.layers]
    assert (found.env, found.workdir, found.user) == (wanted.env, wanted.workdir, wanted.user)


async def test_a_directory_keeps_all_but_devices(image: Image) -> None:
    root = image.layers[0].path
    assert stat.S_IMODE((root / "usr/bin/su").stat().st_mode) == 0o4755
    assert (root / "usr/bin/su").samefile(root / "usr/bin/su2")
    assert ((root / "etc/shadow").stat().st_gid, stat.S_IMODE((root / "etc/shadow").stat().st_mode)) == (42, 0o640)
    assert os.readlink(root / "opt/odd/dangling") == "/nowhere"
    assert (root / os.fsdecode(b"opt/odd/caf\xe9\n")).exists()
    assert not (root / "dev/null").exists()
    assert stat.S_ISFIFO((root / "opt/odd/fifo").stat().st_mode)


@pytest.mark.parametrize("compress", ["cat", "gzip", "zstd", "xz"])
async def test_a_tar_gives_the_same_layer_as_the_directory(
    compress: str, image: Image, rootfs: Path, store: ImageStore, tmp_path: Path
) -> None:
    if shutil.which(compress) is None:
        pytest.skip(f"{compress} is not installed")
    archive = tmp_path / "rootfs.tar"
    command = f"tar -C {rootfs} --numeric-owner -cf - . | {compress} > {archive}"
    run(["sh", "-c", command])
    found = await import_image(archive, ref="tar:1", store=store)
    assert [layer.digest for layer in found.layers] == [image.layers[0].digest]


async def test_our_own_layout_comes_back_the_same(image: Image, tmp_path: Path) -> None:
    other = ImageStore(tmp_path / "other")
    assert_same(await import_image(layout_of(image, tmp_path), ref="back:1", store=other), image)


@needs_skopeo
@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive"])
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
async def test_what_skopeo_writes_comes_back_the_same(
    kind: str, compression: str, image: Image, tmp_path: Path
) -> None:
    target = tmp_path / "written"
    options = [] if kind == "docker-archive" else ["--dest-compress-format", compression]
    skopeo("copy", *options, f"oci:{layout_of(image, tmp_path)}:image", f"{kind}:{target}:name:tag")
    found = await import_image(target, ref="back:1", store=ImageStore(tmp_path / "other"))
    assert_same(found, image)


@needs_skopeo
async def test_a_layer_is_unpacked_once(image: Image, store: ImageStore, tmp_path: Path) -> None:
    await import_image(layout_of(image, tmp_path), ref="again:1", store=store)
    assert len([path for path in (store.root / "layers").iterdir() if path.is_dir()]) == 2
    assert store.resolve("again:1").layers == image.layers


class Registry(http.server.BaseHTTPRequestHandler):
    """The two requests of a pull (OCI distribution-spec, "Pulling manifests" and "Pulling blobs"), from a layout."""

    layout: Path

    def do_GET(self) -> None:
        kind, _, reference = self.path.rpartition("/")
        if self.path == "/v2/":
            return self.answer(b"{}", "application/json")
        index = json.loads((self.layout / "index.json").read_text())
        digest = reference if reference.startswith("sha256:") else index["manifests"][0]["digest"]
        path = self.layout / "blobs/sha256" / digest[7:]
        if not path.is_file():
            return self.send_error(404)
        is_manifest = kind.endswith("/manifests")
        kind = "application/vnd.oci.image.manifest.v1+json" if is_manifest else "application/octet-stream"
        return self.answer(path.read_bytes(), kind)

    do_HEAD = do_GET

    def answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def registry(image: Image, tmp_path: Path) -> Iterator[str]:
    handler = type("Handler", (Registry,), {"layout": layout_of(image, tmp_path)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@needs_skopeo
async def test_a_registry_reference_is_pulled(registry: str, image: Image, tmp_path: Path) -> None:
    found = await import_image(
        f"docker://{registry}/some/name:tag", ref="pulled:1", store=ImageStore(tmp_path / "other")
    )
    assert_same(found, image)


@needs_skopeo
async def test_a_registry_that_cannot_be_reached_is_one_clear_error(store: ImageStore) -> None:
    with pytest.raises(ImageError, match=r"pulling 127\.0\.0\.1:1/x failed.*import a file") as caught:
        await import_image("docker://127.0.0.1:1/x", ref="pulled:1", store=store)
    assert "\n" not in str(caught.value)


# Damage and malice in a layout: one each.


def edit_index(layout: Path, **fields: object) -> None:
    path = layout / "index.json"
    document = json.loads(path.read_text())
    document["manifests"][0].update(fields)
    path.write_text(json.dumps(document))


def blob(layout: Path, which: str) -> Path:
    manifest_digest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    manifest = layout / "blobs/sha256" / manifest_digest[7:]
    if which == "manifest":
        return manifest
    document = json.loads(manifest.read_text())
    entry = document["config"] if which == "config" else document["layers"][-1]
    return layout / "blobs/sha256" / str(entry["digest"])[7:]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "manifest changed": (lambda layout: flip(blob(layout, "manifest")), "digest"),
    "config changed": (lambda layout: flip(blob(layout, "config")), "digest"),
    "layer changed": (lambda layout: flip(blob(layout, "layer")), r"digest|damaged|entry"),
    "layer missing": (lambda layout: blob(layout, "layer").unlink(), "not in the layout"),
    "layer is a link": (
        lambda layout: (blob(layout, "layer").rename(layout / "x"), blob(layout, "layer").symlink_to(layout / "x")),
        "not in the layout",
    ),
    "digest climbs": (lambda layout: edit_index(layout, digest="sha256:../../../etc/passwd"), "not a sha256 digest"),
    "no version": (lambda layout: (layout / "oci-layout").write_text("{}"), "version"),
    "index is no JSON": (lambda layout: (layout / "index.json").write_text("{"), "not JSON"),
    "index is empty": (lambda layout: (layout / "index.json").write_text('{"manifests": []}'), "0 images"),
    "other machine": (
        lambda layout: edit_index(layout, platform={"os": "linux", "architecture": "s390x"}),
        "0 images for linux",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
async def test_a_damaged_layout_is_refused(case: str, image: Image, tmp_path: Path) -> None:
    damage, words = DAMAGE[case]
    layout = layout_of(image, tmp_path)
    damage(layout)
    other = ImageStore(tmp_path / "other")
    with pytest.raises(ImageError, match=words):
        await import_image(layout, ref="back:1", store=other)
    assert other.list() == []
    assert list((other.root / "tmp").iterdir()) == []


async def test_a_docker_archive_that_names_a_file_outside_is_refused(store: ImageStore, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    config = {"rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64]}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "layer.tar").symlink_to("/etc/passwd")
    manifest = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": ["layer.tar"]}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    archive = tmp_path / "saved.tar"
    run(["tar", "-C", str(folder), "-cf", str(archive), "."])
    with pytest.raises(ImageError, match="not a file in it"):
        await import_image(archive, ref="x:1", store=store)


async def test_a_directory_that_is_no_root_file_system_is_refused(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_text("x")
    with pytest.raises(ImageError, match="not a root file system"):
        await import_image(tmp_path / "photos", ref="x:1", store=store)


async def test_the_host_image_cannot_be_exported(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cannot be exported"):
        export_layout(store.resolve("host"), tmp_path / "layout")
