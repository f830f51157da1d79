#!/bin/sh
set -eu
python3 - <<'PY'
import itertools
import sqlite3

base = sqlite3.connect(":memory:")
base.executescript(open("/app/load.sql").read())
faulty = []
for (sensor,) in base.execute("SELECT DISTINCT sensor FROM reading ORDER BY sensor").fetchall():
    rows = base.execute("SELECT minute, value FROM reading WHERE sensor = ? ORDER BY minute", (sensor,)).fetchall()
    gap = any(later[0] - earlier[0] > 10 for earlier, later in zip(rows, rows[1:]))
    stuck = any(len(list(group)) >= 4 for _, group in itertools.groupby(value for _, value in rows))
    if gap or stuck:
        faulty.append(sensor)
with open("/app/faulty.txt", "w") as file:
    file.writelines(name + "\n" for name in faulty)
PY
