"""What the image store writes to disk: image manifests, layer facts and references.

Each file carries a version and forbids unknown keys. An image manifest is stored as canonical JSON, so the
digest of the file's bytes is the digest of the image.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from proctor.common import canonical_json, digest_bytes
from proctor.sandbox.contract import ImageError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REF = re.compile(r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?")


def _digest(value: str) -> str:
    if not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r} is not a sha256 digest")
    return value


def absolute_path(value: str) -> str:
    """`value` if it is an absolute path; ValueError otherwise."""
    if not value.startswith("/") or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path")
    return value


_M = TypeVar("_M", bound=BaseModel)
Digest = Annotated[str, AfterValidator(_digest)]
AbsolutePath = Annotated[str, AfterValidator(absolute_path)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MountRecord(_Record):
    """A read-only view of the machine; `{empty}` as the source is the store's own empty directory."""

    source: str
    target: AbsolutePath


class ImageManifest(_Record):
    """One image: layers lowest first, and the defaults to run with."""

    version: Literal[1] = 1
    layers: tuple[Digest, ...]
    env: dict[str, str] = Field(default_factory=dict)
    workdir: AbsolutePath = "/"
    user: str = "root"
    mounts: tuple[MountRecord, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)

    def data(self) -> bytes:
        """The bytes that are stored and digested."""
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        """The image's digest."""
        return digest_bytes(self.data())


class LayerRecord(_Record):
    """What is known about a stored layer without walking it."""

    version: Literal[1] = 1
    digest: Digest
    size_bytes: int
    entries: int


class RefRecord(_Record):
    """Where a reference points, and since when."""

    digest: Digest
    created_at: str


class RefTable(_Record):
    """All references of a store."""

    version: Literal[1] = 1
    refs: dict[str, RefRecord] = Field(default_factory=dict)


def parse_record(model: type[_M], data: bytes, what: str) -> _M:
    """Read one of the store's own files; a damaged one is an ImageError that names it."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ImageError(f"{what} is damaged at {where or 'the top'}: {first['msg']}") from error


def check_ref(ref: str) -> str:
    """`ref` if it is a well-formed image reference (`name[/name…][:tag]`), else an ImageError."""
    if len(ref) > 256 or not _REF.fullmatch(ref):
        raise ImageError(f"{ref!r} is not an image reference", field="image", remedy="use name:tag, in lower case")
    return ref


def is_digest(text: str) -> bool:
    """True for `sha256:` and 64 hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None
