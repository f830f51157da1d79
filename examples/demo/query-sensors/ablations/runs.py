#!/usr/bin/env python3
"""For each sensor: its longest gap between readings in minutes, and its longest run of equal values."""

import sqlite3
import sys
from itertools import groupby, pairwise
from pathlib import Path

base = sqlite3.connect(":memory:")
base.executescript(Path(sys.argv[1]).read_text())
for (sensor,) in base.execute("SELECT DISTINCT sensor FROM reading ORDER BY sensor").fetchall():
    rows = base.execute("SELECT minute, value FROM reading WHERE sensor = ? ORDER BY minute", (sensor,)).fetchall()
    gap = max((later - former for (former, _), (later, _) in pairwise(rows)), default=0)
    run = max(len(list(same)) for _, same in groupby(rows, key=lambda row: row[1]))
    print(f"{sensor} gap={gap} run={run}")
