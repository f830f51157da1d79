"""The image recipe of a SWE instance: what `env.json` says, in the format of docs/images.md.

The virtual environment comes before the repository, so instances with the same requirements share those layers.
The repository becomes one commit after its editable install, so that install is part of the base state and no
later history is there at all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError

if TYPE_CHECKING:
    from proctor.tasks.swe_rows import EnvRecipe

REPO = "/testbed"
VENV = "/venv"
_PIP = f"{VENV}/bin/python -m pip install --disable-pip-version-check"
_PATH = f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EDITABLE = "python -m pip install -e . --no-deps --no-build-isolation"
_KNOWN_INSTALLS = (
    re.compile(r"python -m venv VENV\b.*"),
    re.compile(r"python -m pip install pip==[0-9a-z.]+"),
    re.compile(r"python -m pip install (?:--no-deps )?-r requirements\.txt\b.*"),
    re.compile(r"cd REPO && (?:[A-Z_]+=\S+ )*" + re.escape(_EDITABLE)),
)
COMMENT = """\
# Made from env.json. The image has no compiler: a requirement without a wheel for this Python has to be
# pure Python, or the step that installs it fails and says which one it was.
"""


def recipe_document(env: EnvRecipe) -> dict[str, Any]:
    """The recipe as a TOML document.

    Raises ConfigError for an install command that is not one of the forms we know: an environment made
    differently from what the row's authors measured would be another task.
    """
    for command in env.install_commands:
        if not any(known.fullmatch(command) for known in _KNOWN_INSTALLS):
            raise ConfigError(f"install command not understood: {command}", field=f"{env.instance_id} env.json")
    venv = [f'"$PYTHON" -m venv {VENV}']
    if env.pip:
        venv.append(f"{_PIP} pip=={env.pip}")
    requirements = "".join(f"{one}\n" for one in env.requirements)
    editable: dict[str, Any] = {"run": _EDITABLE.replace("python -m pip install", _PIP), "cwd": REPO}
    if env.environment:
        editable["env"] = dict(env.environment)
    return {
        "schema": 1,
        "python": env.series,
        "workdir": REPO,
        "env": {**env.environment, "PATH": _PATH, "VIRTUAL_ENV": VENV},
        "step": [
            {"run": " && ".join(venv)},
            {"write": {"path": f"{VENV}/requirements.txt", "text": requirements}},
            {"run": f"{_PIP} --no-deps -r {VENV}/requirements.txt"},
            {"unpack": {"archive": env.archive.file, "sha256": env.archive.sha256, "to": REPO}},
            editable,
            {"git": {"path": REPO}},
        ],
    }
