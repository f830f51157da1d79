"""`scripts/bench swe`: does the whole path agree with what is known about real SWE-bench instances?

For every instance of a folder (default: ../shared/data/swe beside the repository): the oracle must be resolved, the
null agent must not, the gold patch without a hunk that the tests need must not, and the compat verdict of a published
model patch must equal the published report, test by test. Prints a table; exit code 0 when everything agrees,
1 when something does not, 6 when the machinery failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "swe"


def hunks_of(patch: str) -> list[tuple[str, str]]:
    """The hunks of a git diff in order, as (file header, hunk)."""
    found = []
    for part in re.split(r"(?m)^(?=diff --git )", patch):
        header, *hunks = re.split(r"(?m)^(?=@@ )", part)
        found.extend((header, hunk) for hunk in hunks)
    return found


def without_hunk(patch: str, index: int) -> str:
    """The diff with hunk `index` left out; a file that has no hunk left is left out too."""
    text, last = "", None
    for number, (header, hunk) in enumerate(hunks_of(patch)):
        if number != index:
            text += (header if header != last else "") + hunk
            last = header
    return text


def read_instances(data: Path, only: str | None) -> dict[str, dict[str, Any]]:
    """Rows, observations and published patches by instance id."""
    found = {}
    for folder in sorted(path.parent for path in data.glob("*/instance.json")):
        if only and only not in folder.name:
            continue
        entry: dict[str, Any] = {"row": json.loads((folder / "instance.json").read_text())}
        entry["observed"] = json.loads((folder / "observed.json").read_text())
        if (folder / "published_model.patch").exists():
            entry["model_patch"] = (folder / "published_model.patch").read_text()
            entry["report"] = json.loads((folder / "published_report.json").read_text())
        found[folder.name] = entry
    return found


def proctor(*arguments: str) -> dict[str, dict[str, Any]]:
    """`proctor run …` into a fresh directory; returns the grade of each trial by (instance, agent)."""
    with tempfile.TemporaryDirectory(prefix="proctor-bench-swe-") as folder:
        out = Path(folder, "run")
        command = [sys.executable, "-m", "proctor", "run", *arguments, "-o", str(out)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode not in (0, 6):
            sys.exit(done.returncode)
        grades = {}
        for path in sorted(out.glob("trials/*/result.json")):
            result = json.loads(path.read_text())
            grade = path.with_name("grade.json")
            result["grade"] = json.loads(grade.read_text()) if grade.exists() else {}
            grades[f"{result['task']} {result['agent']}"] = result
        return grades


def predictions(data: Path, patches: dict[str, str], only: str | None) -> dict[str, dict[str, Any]]:
    """Grade one patch for each instance, without an agent; by instance id."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for instance, patch in patches.items():
            row = {"instance_id": instance, "model_patch": patch, "model_name_or_path": "bench"}
            file.write(json.dumps(row) + "\n")
        file.flush()
        chosen = [f"--task=*{only}*"] if only else []
        graded = proctor(str(data), *chosen, "--predictions", file.name)
    return {key.split()[0].rpartition("/")[2]: value for key, value in graded.items()}


def say(result: dict[str, Any] | None) -> str:
    """`strict/compat` of one trial: yes, no, or the outcome where there is no verdict."""
    if result is None:
        return "-"
    words = {True: "yes", False: "no", None: str(result["outcome"])}
    return f"{words[result['grade'].get('resolved')]}/{words.get(result.get('compat_resolved'), '-')}"


def same_report(result: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether the compat verdict equals the published report in every test and in the sum."""
    compat = result["grade"].get("compat") or {}
    mine, theirs = compat.get("tests", {}), report["tests_status"]
    return compat.get("resolved") == report["resolved"] and all(
        sorted(mine.get(group, {}).get(kind, [])) == sorted(theirs[group][kind])
        for group in ("FAIL_TO_PASS", "PASS_TO_PASS")
        for kind in ("success", "failure")
    )


def hunk_row(instance: str, entry: dict[str, Any], results: list[dict[str, dict[str, Any]]]) -> tuple[str, bool]:
    """`hunk:verdict` for each hunk left out, and whether all agree with what was observed."""
    texts, agree = [], True
    for item in entry["observed"].get("gold_patch_minus_one_hunk") or []:
        result = results[item["hunk"]].get(instance)
        verdict = None if result is None else result["grade"].get("resolved")
        agree = agree and verdict is item["resolved"]
        texts.append(f"{item['hunk']}:{ {True: 'yes', False: 'no', None: '?'}[verdict] }".replace(" ", ""))
    return " ".join(texts) or "-", agree


def main() -> int:
    """Run, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", help="instances whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.data.is_dir():
        print(f"bench swe: no such folder: {options.data}", file=sys.stderr)
        return 4
    started = time.monotonic()
    instances = read_instances(options.data, options.only)
    chosen = [f"--task=*{options.only}*"] if options.only else []
    agents = proctor(str(options.data), *chosen, "--agent", "oracle", "--agent", "null")
    agents = {key.rpartition("/")[2]: value for key, value in agents.items()}
    models = predictions(
        options.data, {name: e["model_patch"] for name, e in instances.items() if "model_patch" in e}, options.only
    )
    most = max((len(e["observed"].get("gold_patch_minus_one_hunk") or []) for e in instances.values()), default=0)
    minus = []
    for index in range(most):
        patches = {
            name: without_hunk(e["row"]["patch"], index)
            for name, e in instances.items()
            if len(e["observed"].get("gold_patch_minus_one_hunk") or []) > index
        }
        minus.append(predictions(options.data, patches, options.only))

    rows, agreed = [], True
    for name, entry in instances.items():
        oracle, null = agents.get(f"{name} oracle"), agents.get(f"{name} null")
        hunks, hunks_agree = hunk_row(name, entry, minus)
        model = models.get(name) if "report" in entry else None
        model_agrees = "report" not in entry or (model is not None and same_report(model, entry["report"]))
        good = say(oracle) == "yes/yes" and say(null) == "no/no" and hunks_agree and model_agrees
        agreed = agreed and good
        published = {True: "= published", False: "DIFFERS"}[model_agrees] if "report" in entry else ""
        rows.append(
            {
                "instance": name,
                "oracle": say(oracle),
                "null": say(null),
                "gold minus hunk": hunks,
                "model patch": f"{say(model)} {published}".strip(),
                "agrees": good,
            }
        )
    if options.json:
        print(json.dumps({"rows": rows, "agrees": agreed, "seconds": round(time.monotonic() - started, 1)}, indent=1))
    else:
        show(rows)
        print(f"strict/compat verdicts; {sum(r['agrees'] for r in rows)} of {len(rows)} instances agree with what is")
        print(f"known about them; {time.monotonic() - started:.0f} s")
    return 0 if agreed else 1


def show(rows: list[dict[str, Any]]) -> None:
    """A table a person can read."""
    table = [[key for key in rows[0]] if rows else []]
    table += [
        [{True: "yes", False: "NO"}.get(v, str(v)) if isinstance(v, bool) else str(v) for v in r.values()] for r in rows
    ]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
