"""How programs of a carried sandbox find the name server: two read-only layers around the image's own.

`/etc/resolv.conf` lies above the image's layers, whatever the image has there (often a link that leads nowhere), and
below what sandboxes wrote: a program that changes it changes its own copy, and a diff shows that and nothing of ours.
`/etc/hosts` and `/etc/nsswitch.conf` lie below the image, so they are there only where the image has none. All
resolvers (glibc, musl, Go's, static ones) read these files and nothing else.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from proctor.common import digest_json

_ABOVE: Final = {"etc/resolv.conf": "nameserver 127.0.0.53\n"}
_BELOW: Final = {
    "etc/hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
}


class NameLayers:
    """The two layers, kept in `home` for all Edges there and for sandboxes that outlive theirs."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder: Path | None = None

    def around(
        self, paths: tuple[Path | int, ...], image_layers: int, above: tuple[Path, ...] = ()
    ) -> tuple[Path | int, ...]:
        """A stack, lowest first, whose first `image_layers` are the image's, with the two layers put in, and `above`
        right above them."""
        if self._folder is None:
            self._folder = self._make()
        return (
            self._folder / "below",
            *paths[:image_layers],
            self._folder / "above",
            *above,
            *paths[image_layers:],
        )

    def _make(self) -> Path:
        folder = self._home / f"names-{digest_json([_ABOVE, _BELOW])[7:19]}"
        if folder.is_dir():
            return folder
        self._home.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="names-", dir=self._home))
        try:
            for layer, files in (("above", _ABOVE), ("below", _BELOW)):
                for name, text in files.items():
                    file = draft / layer / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(text)
                    for path, mode in ((file, 0o644), (file.parent, 0o755), (draft / layer, 0o755)):
                        path.chmod(mode)  # whatever the umask says
            os.rename(draft, folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not folder.is_dir():  # another Edge may have been faster
                raise
        return folder
