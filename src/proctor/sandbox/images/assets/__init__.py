"""Packaged image recipes, and the table that maps public base-image names to them."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

_HERE = Path(__file__).parent


def recipe_refs() -> list[str]:
    """References of the packaged recipes: `<name>@<tag>.toml` is `name:tag`."""
    return sorted(path.name.removesuffix(".toml").replace("@", ":") for path in _HERE.glob("*@*.toml"))


def recipe_path(ref: str) -> Path | None:
    """The packaged recipe for a reference, if there is one."""
    path = _HERE / f"{ref.replace(':', '@')}.toml"
    return path if ref in recipe_refs() else None


def base_for(name: str) -> str | None:
    """The local image that stands for a public base-image name (`ubuntu:24.04`), or None."""
    table = tomllib.loads((_HERE / "bases.toml").read_text(encoding="utf-8"))
    plain = name.partition("@")[0]
    for prefix in ("docker.io/library/", "docker.io/", "library/"):
        plain = plain.removeprefix(prefix)
    if ":" not in plain:
        plain += ":latest"
    for entry in table["base"]:
        if any(fnmatch.fnmatchcase(plain, pattern) for pattern in entry["names"]):
            return str(entry["image"])
    return None
