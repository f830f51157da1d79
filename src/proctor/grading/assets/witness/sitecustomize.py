# ruff: noqa
# mypy: ignore-errors
"""Lets pytest load the witness, in processes that can import it; then the image's own sitecustomize, if it has one."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("PROCTOR_WITNESS"):
    _plugins = [p for p in os.environ.get("PYTEST_PLUGINS", "").split(",") if p and p != "proctor_witness"]
    os.environ["PYTEST_PLUGINS"] = ",".join(_plugins + ["proctor_witness"])


def _own():
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec(
        "sitecustomize", [p for p in sys.path if os.path.abspath(p) != _HERE]
    )
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_own()
