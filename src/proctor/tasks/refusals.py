"""What a task may ask for and Proctor does not honour yet. Each is refused by name: never ignored in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.tasks.findings import Findings
    from proctor.tasks.schema import TaskToml

COMPOSE_FILES = (
    "docker-compose.yaml",
    "docker-compose.yml",
    "singularity-compose.yaml",
    "singularity-compose.yml",
)


def refuse_steps(config: dict[str, Any], root: Path, findings: Findings) -> bool:
    """Multi-step tasks. Returns True when refused: the other rules speak of single-step tasks."""
    if config.get("steps"):
        findings.refuse(("steps",), "a task of several steps")
        return True
    if (root / "steps").is_dir():
        findings.problems.append(_refused_file("steps/", "a task of several steps"))
        return True
    return False


def refuse_unsupported(task: TaskToml, root: Path, findings: Findings) -> None:
    """Everything in a well-formed single-step task that we cannot honour."""
    environment = task.environment
    if environment.os == "windows":
        findings.refuse(("environment", "os"), "Windows")
    if environment.gpus:
        findings.refuse(("environment", "gpus"), "a GPU")
    elif environment.gpu_types:
        findings.refuse(("environment", "gpu_types"), "a GPU")
    if environment.tpu is not None:
        findings.refuse(("environment", "tpu"), "a TPU")
    if environment.mcp_servers:
        findings.refuse(("environment", "mcp_servers"), "an MCP server")
    if environment.skills_dir is not None:
        findings.refuse(("environment", "skills_dir"), "a skills directory")
    if task.verifier.environment is not None:
        findings.refuse(("verifier", "environment"), "an environment of the verifier's own")
    if task.verifier.collect:
        findings.refuse(("verifier", "collect"), "a collect command")
    if task.multi_step_reward_strategy is not None:
        findings.refuse(("multi_step_reward_strategy",), "a task of several steps")
    for index, artifact in enumerate(task.artifacts):
        if artifact.service not in (None, "main"):
            findings.refuse(("artifacts", index, "service"), f"service {artifact.service!r}")
    for folder in ("environment", "tests"):
        for name in COMPOSE_FILES:
            if (root / folder / name).is_file():
                findings.problems.append(_refused_file(f"{folder}/{name}", "a compose file"))
    if (root / "tests" / "Dockerfile").is_file():
        findings.problems.append(_refused_file("tests/Dockerfile", "an image of the verifier's own"))
    if (root / "trajectory.json").is_file():
        findings.problems.append(_refused_file("trajectory.json", "a trajectory to start from"))
    for folder, script in (("tests", "test"), ("solution", "solve")):
        if (root / folder / f"{script}.bat").is_file() and not (root / folder / f"{script}.sh").is_file():
            findings.problems.append(_refused_file(f"{folder}/{script}.bat", "a Windows script"))


def _refused_file(file: str, what: str) -> Any:
    from proctor.tasks.model import Problem

    return Problem(file, None, None, f"{what} cannot be honoured yet", None, "error", "refused")
