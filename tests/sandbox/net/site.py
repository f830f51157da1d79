"""A site on this machine's loopback that package managers and version control can use: plain files over HTTP and TLS.

Everything in it is made here: a Python package and its index, an npm package and its metadata, a git repository, a
Debian repository.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import threading
import zipfile
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

WHEEL = "tinypkg-1.0-py3-none-any.whl"


def build(root: Path) -> Path:
    """Lay out the site below `root`."""
    (root / "file.txt").write_text("a file\n")
    _python(root)
    _npm(root)
    _git(root)
    _debian(root)
    return root


def _python(root: Path) -> None:
    files = {
        "tinypkg.py": "answer = 42\n",
        "tinypkg-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n",
        "tinypkg-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in files) + "tinypkg-1.0.dist-info/RECORD,,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in {**files, "tinypkg-1.0.dist-info/RECORD": record}.items():
            archive.writestr(name, text)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    folder = root / "simple" / "tinypkg"
    folder.mkdir(parents=True)
    (folder / "index.html").write_text(f'<a href="../../files/{WHEEL}#sha256={digest}">{WHEEL}</a>')
    (root / "files").mkdir()
    (root / "files" / WHEEL).write_bytes(buffer.getvalue())


def _npm(root: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        manifest = {"name": "tinynpm", "version": "1.0.0", "main": "index.js"}
        for name, text in (("package.json", json.dumps(manifest)), ("index.js", "module.exports = 42\n")):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    data = buffer.getvalue()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    (root / "npm").mkdir()
    (root / "npm" / "tinynpm-1.0.0.tgz").write_bytes(data)
    version = manifest | {"dist": {"tarball": "https://pkgs.test/npm/tinynpm-1.0.0.tgz", "integrity": integrity}}
    document = {"name": "tinynpm", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (root / "npm" / "tinynpm").write_text(json.dumps(document))


def _git(root: Path) -> None:
    work = root / "work"
    work.mkdir()
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    (work / "readme").write_text("from git\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run(["git", *identity, *command], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", work, root / "repo.git"], check=True)
    subprocess.run(["git", "update-server-info"], cwd=root / "repo.git", check=True)


def _debian(root: Path) -> None:
    packages = (
        b"Package: tinydeb\nVersion: 1.0\nArchitecture: all\nFilename: pool/tinydeb.deb\nSize: 1\nDescription: t\n"
    )
    folder = root / "debian" / "dists" / "stable" / "main" / "binary-amd64"
    folder.mkdir(parents=True)
    (folder / "Packages").write_bytes(packages)
    (folder / "Packages.gz").write_bytes(gzip.compress(packages))
    lines = ["Suite: stable", "Codename: stable", "Components: main", "Architectures: amd64"]
    lines += ["Date: Mon, 30 Nov 2026 12:00:00 UTC", "SHA256:"]
    for name in ("Packages", "Packages.gz"):
        data = (folder / name).read_bytes()
        lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} main/binary-amd64/{name}")
    (root / "debian" / "dists" / "stable" / "Release").write_text("\n".join(lines) + "\n")


class _Handler(SimpleHTTPRequestHandler):
    """Files, and what a Kubernetes server says of itself (kubectl is the Go program that many machines have)."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/version"):
            body = json.dumps({"major": "1", "minor": "42", "gitVersion": "v1.42.0", "platform": "a/b"}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(root: Path, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve the folder on loopback; gives `127.0.0.1:port`."""

    class Handler(_Handler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(root))  # type: ignore[arg-type]

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self):  # type: ignore[no-untyped-def]
            sock, address = super().get_request()
            if context is not None:
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            return sock, address

        def handle_error(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
