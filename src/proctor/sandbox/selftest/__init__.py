"""The isolation self-test: what must not be possible in a sandbox, tried from inside it.

A probe (csrc/probe, a static program) tries and reports facts; the checks here judge them on the host. The full form
(`examine`, `proctor doctor --isolation`) also puts loads on sandboxes and looks at what became of them; the short one
(`SandboxSpec.self_test`) is one run of the probe in the sandbox itself. See docs/design/self-test.md.
"""

from __future__ import annotations

from proctor.sandbox.selftest.checklist import ITEMS, VERSION, Item, table
from proctor.sandbox.selftest.checks import Line, Status
from proctor.sandbox.selftest.run import examine

__all__ = ["ITEMS", "VERSION", "Item", "Line", "Status", "examine", "table"]
