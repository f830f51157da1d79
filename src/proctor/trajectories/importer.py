"""Any transcript that Proctor can read, told apart by its content and not by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError
from proctor.trajectories.atif import Trajectory, parse_trajectory
from proctor.trajectories.draft import Imported, Losses, plain
from proctor.trajectories.inspect_log import import_eval, import_log, is_inspect
from proctor.trajectories.mini import import_mini, is_mini
from proctor.trajectories.openhands import import_openhands, is_openhands
from proctor.trajectories.swe_agent import import_swe_agent, is_swe_agent

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = ("ATIF 1.0 to 1.8", "mini-swe-agent", "SWE-agent", "OpenHands", "Inspect")
MAX_BYTES = 1 << 30
MAX_REPORT_BYTES = 16 << 20
_APPLIED = "patch_successfully_applied"


def import_file(path: Path) -> list[Imported]:
    """The trajectories in a file, each as ATIF v1.8 with what was lost named. Raises ConfigError."""
    name = str(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{size} bytes are more than {MAX_BYTES}", field=name)
        with path.open("rb") as file:
            head = file.read(4)
            if head == b"PK\x03\x04":
                return list(import_eval(path))
            content = head + file.read()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", field=name) from error
    found = import_document(content, file=name)
    verdict = _verdict_beside(path)
    return [_with_verdict(one, verdict) for one in found] if verdict else found


def _verdict_beside(path: Path) -> Any:
    """The SWE-bench report that lies beside a trajectory (`X.traj.json`, `X.report.json`), if there is one."""
    beside = path.with_name(path.name.partition(".traj")[0] + ".report.json")
    if beside == path or ".traj" not in path.name or not beside.is_file() or beside.stat().st_size > MAX_REPORT_BYTES:
        return None
    try:
        return json.loads(beside.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _with_verdict(one: Imported, verdict: Any) -> Imported:
    extra = {**(one.trajectory.extra or {}), "report": plain(verdict)}
    return replace(one, trajectory=one.trajectory.model_copy(update={"extra": extra}))


def import_document(content: bytes, *, file: str = "transcript") -> list[Imported]:
    """The trajectories in the bytes of a JSON document."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON, and not a zip file: {error}", field=file,
                          remedy=f"these are read: {', '.join(FORMATS)}") from error  # fmt: skip
    if isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF"):
        return [import_atif(content, file=file)]
    if is_inspect(value):
        return list(import_log(value, file=file))
    if is_report(value):
        raise ConfigError("a SWE-bench report: a verdict, not a transcript", field=file,
                          remedy="it is read together with the .traj.json beside it")  # fmt: skip
    for fits, read in ((is_openhands, import_openhands), (is_swe_agent, import_swe_agent), (is_mini, import_mini)):
        if fits(value):
            return [_guarded(read, value, file)]
    raise ConfigError("not a transcript that is known", field=file, remedy=f"these are read: {', '.join(FORMATS)}")


def is_report(value: Any) -> bool:
    """True for the verdicts that SWE-bench's harness writes: of one instance, or by instance."""
    if not isinstance(value, dict) or not value:
        return False
    parts = [value] if _APPLIED in value else list(value.values())
    return all(isinstance(one, dict) and _APPLIED in one for one in parts)


def _guarded(read: Any, value: Any, file: str) -> Imported:
    """A file of the right outer shape may still be anything inside."""
    try:
        found: Imported = read(value, file=file)
        return found
    except (AttributeError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ConfigError(f"not shaped as its format says: {type(error).__name__}: {error}", field=file) from error


def import_atif(content: bytes, *, file: str) -> Imported:
    """An ATIF document of any version, brought to v1.8."""
    then = parse_trajectory(content, name=file)
    losses = Losses()
    value = _upgraded(then.model_dump(exclude_none=True), losses)
    now = Trajectory.model_validate(value)
    return Imported(now, then.schema_version, losses.lines(), now.trajectory_id or "")


def _upgraded(value: dict[str, Any], losses: Losses) -> dict[str, Any]:
    """The document with the version of today; references that only older versions allow become extra."""
    children = [_upgraded(child, losses) for child in value.get("subagent_trajectories", ())]
    known = {child.get("trajectory_id") for child in children}
    value = {**value, "schema_version": "ATIF-v1.8"} | ({"subagent_trajectories": children} if children else {})
    for step in value["steps"]:
        for result in (step.get("observation") or {}).get("results", ()):
            references = result.get("subagent_trajectory_ref") or []
            kept = [one for one in references if "trajectory_path" in one or one.get("trajectory_id") in known]
            if len(kept) < len(references):
                outside = [one for one in references if one not in kept]
                losses.add("a reference to a subagent's session outside the file, kept in extra", len(outside))
                result["extra"] = {**(result.get("extra") or {}), "subagent_sessions": outside}
                result["subagent_trajectory_ref"] = kept or None
    return value
