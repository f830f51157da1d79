# ruff: noqa
# mypy: ignore-errors
"""Django's `runtests.py` or `manage.py test`: the standard library's runner below, so the same taps."""

import os


def run(config, send):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_unittest.py")
    import importlib.util

    spec = importlib.util.spec_from_file_location("run_unittest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.decoys = decoys  # set by entry.py
    return module.run(config, send)
