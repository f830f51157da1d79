"""Whether the lock of a run is the one that its ledger names.

The chain covers plan and records, and the first row names the digest of `run.json`, so that limits, conditions and
weights cannot be edited unseen either. A resumed run may complete the lock by images that could not be had before; a
row `relocked` then names its new digest, and comes first: of a crash between the two either lock is right.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from proctor.common import digest_file

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.runs.ledger import Ledger

NOT_VOUCHED = "the lock is not vouched for: the ledger is of a version that did not name it"


def is_vouched(ledger: Ledger) -> bool:
    """Whether the ledger names a lock at all; those of earlier versions do not."""
    return bool(_named(ledger))


def lock_damage(directory: Path, ledger: Ledger) -> str | None:
    """What is wrong with `run.json`: it is not the one that the ledger names. None: nothing, or nothing is known."""
    named = _named(ledger)
    unfinished = sum(1 for _ in takewhile(lambda row: row.kind == "relocked", reversed(ledger.rows)))
    if not named or digest_file(directory / "run.json") in named[-1 - unfinished :]:
        return None
    return "run.json: the lock was changed: its digest is not the one that the ledger names"


def _named(ledger: Ledger) -> list[str]:
    return [row.data["lock"] for row in ledger.of("run", "relocked") if "lock" in row.data]
