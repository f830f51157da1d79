"""How programs of a sandbox come to believe the boundary's certificates, where TLS ends there: one more layer.

It lies above the image's layers and below what the sandbox writes, like the name server's, so no diff counts it. In it
is the image's own bundle of roots with the sandbox's authority appended, at the place where OpenSSL, GnuTLS, Go and apt
look; what brings roots of its own (pip, requests, Node) is told by environment variables.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

BUNDLE: Final = "etc/ssl/certs/ca-certificates.crt"
_ELSEWHERE: Final = "etc/proctor/ca-certificates.crt"
_BUNDLE_MAX: Final = 4 << 20
_VARIABLES: Final = (
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "HTTPLIB2_CA_CERTS",
    "NIX_SSL_CERT_FILE",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
)


class TrustLayer:
    """The layer of one incarnation. `folder` is made by `make` and removed by `remove`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._place = BUNDLE

    @property
    def environment(self) -> dict[str, str]:
        """Variables that name the bundle."""
        return dict.fromkeys(_VARIABLES, f"/{self._place}")

    def make(self, paths: tuple[Path | int, ...], authorities: str) -> Path:
        """Write the layer for an image of these layers (lowest first): its roots and `authorities` (PEM). Returns it.
        Blocking, a millisecond."""
        shutil.rmtree(self.folder, ignore_errors=True)
        roots, plain = _find(paths)
        self._place = BUNDLE if plain else _ELSEWHERE
        file = self.folder / self._place
        file.parent.mkdir(parents=True)
        file.write_bytes(roots.rstrip(b"\n") + b"\n" * bool(roots) + authorities.encode("ascii"))
        file.chmod(0o644)
        for parent in file.relative_to(self.folder).parents:
            (self.folder / parent).chmod(0o755)  # whatever the umask says
        return self.folder

    def remove(self) -> None:
        """Remove it. Blocking."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _find(paths: tuple[Path | int, ...]) -> tuple[bytes, bool]:
    """The bundle that a sandbox on these layers would see, and whether the way to it has no links, so that a layer
    above may have plain directories there. A bundle that cannot be read safely counts as none."""
    parts = BUNDLE.split("/")
    for layer in reversed(paths):
        descriptor = os.dup(layer) if isinstance(layer, int) else os.open(layer, os.O_PATH | os.O_DIRECTORY)
        try:
            for index, part in enumerate(parts):
                try:
                    info = os.stat(part, dir_fd=descriptor, follow_symlinks=False)
                except FileNotFoundError:
                    break
                if index == len(parts) - 1:
                    return _read(part, descriptor, info), True
                if not stat.S_ISDIR(info.st_mode):
                    return b"", False
                below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
        finally:
            os.close(descriptor)
    return b"", True


def _read(name: str, folder: int, info: os.stat_result) -> bytes:
    if not stat.S_ISREG(info.st_mode) or info.st_size > _BUNDLE_MAX:
        return b""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_BUNDLE_MAX)
