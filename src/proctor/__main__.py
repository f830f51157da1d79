"""`python -m proctor`."""

from proctor.cli.main import entry

entry()
