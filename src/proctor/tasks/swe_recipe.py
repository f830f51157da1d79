"""The image recipe of a SWE instance: what `env.json` says, in the format of docs/images.md."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError

if TYPE_CHECKING:
    from proctor.tasks.swe_rows import EnvRecipe

REPO = "/testbed"
VENV = "/venv"
_BASES = {"3.9": "debian:bullseye", "3.13": "debian:trixie"}
_DEFAULT_BASE = "debian:bookworm"
_EDITABLE = "python -m pip install -e . --no-deps --no-build-isolation"
_KNOWN_INSTALLS = (
    re.compile(r"python -m venv VENV\b.*"),
    re.compile(r"python -m pip install pip==[0-9a-z.]+"),
    re.compile(r"python -m pip install (?:--no-deps )?-r requirements\.txt\b.*"),
    re.compile(r"cd REPO && (?:[A-Z_]+=\S+ )*" + re.escape(_EDITABLE)),
)


def recipe_document(env: EnvRecipe) -> dict[str, Any]:
    """The recipe as a TOML document.

    Raises ConfigError for an install command that is not one of the forms we know: an environment made
    differently from what the row's authors measured would be another task.
    """
    for command in env.install_commands:
        if not any(known.fullmatch(command) for known in _KNOWN_INSTALLS):
            raise ConfigError(f"install command not understood: {command}", field=f"{env.instance_id} env.json")
    setup = [f"PYTHON -m venv {VENV}"]
    if env.pip:
        setup.append(f"{VENV}/bin/python -m pip install pip=={env.pip}")
    return {
        "base": _BASES.get(env.series, _DEFAULT_BASE),
        "python": env.python,
        "steps": [
            {"unpack": env.archive.file, "to": REPO},
            {"run": " && ".join(setup)},
        ],
        "env": dict(env.environment),
    }
