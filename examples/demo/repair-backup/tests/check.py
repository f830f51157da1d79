import os
import pathlib
import subprocess
import sys
import tempfile

FILES = {"plain": "1", "with space": "2", ".hidden": "3", "sub dir/deep file": "4", "sub dir/.dot": "5", "-dash": "6", "*": "7"}
with tempfile.TemporaryDirectory() as folder:
    source, target = pathlib.Path(folder, "a b"), pathlib.Path(folder, "new", "c d")
    for name, text in FILES.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(["sh", "/app/backup.sh", str(source), str(target)], capture_output=True)
    copied = {str(p.relative_to(target)): p.read_text() for p in target.rglob("*") if p.is_file()}
    missing = subprocess.run(["sh", "/app/backup.sh", os.path.join(folder, "nowhere"), str(target)], capture_output=True)
    shell = pathlib.Path("/app/backup.sh").read_text().startswith("#!/bin/sh")
sys.exit(not (done.returncode == 0 and copied == FILES and missing.returncode == 1 and missing.stderr and shell))
