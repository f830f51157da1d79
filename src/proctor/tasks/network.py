"""What network a task asks for in each phase, and whether it may have it.

Harbor's default is public: a task that says nothing gets the internet there. Proctor's is none. A run that was told to
(`--allow-network`) gives tasks what they ask for, or what Harbor would give them; without that, a task that names a
network is refused, and one that says nothing runs without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.tasks.findings import Findings
    from proctor.tasks.schema import EnvironmentTable, TaskToml
    from proctor.tasks.toml_lines import KeyPath

Mode = Literal["none", "allowlist", "public"]
_MODES: dict[str, Mode] = {"no-network": "none", "allowlist": "allowlist", "public": "public"}
_REMEDY = 'run it with --allow-network, or without: `[proctor] network = "none"`, here or in the dataset\'s entry'


_ONLINE = {"PIP_NO_INDEX": "0", "UV_OFFLINE": "0", "APT_CONFIG": "/dev/null"}


def online_env(image_env: Mapping[str, str]) -> dict[str, str]:
    """For a sandbox that has a network: what takes back the settings by which an image keeps package managers from
    waiting for one."""
    return {name: value for name, value in _ONLINE.items() if name in image_env}


@dataclass(frozen=True, slots=True)
class PhaseNetwork:
    """What one phase may reach: nothing, the `hosts` (exact or `*.suffix`), or every public name."""

    mode: Mode = "none"
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskNetwork:
    """What a task has in the agent's sandbox and in the grading room."""

    agent: PhaseNetwork = PhaseNetwork()
    verifier: PhaseNetwork = PhaseNetwork()

    @property
    def is_none(self) -> bool:
        """Whether no phase reaches anything."""
        return self.agent.mode == "none" and self.verifier.mode == "none"


@dataclass(frozen=True, slots=True)
class Decision:
    """The network that a task gets, and the notes on it for the record."""

    network: TaskNetwork
    notes: tuple[str, ...] = ()


def decide(task: TaskToml, findings: Findings, *, allowed: bool, forced_none: bool) -> Decision:
    """The network of a task, where the run allows one (`allowed`) and neither task nor dataset takes it away."""
    asked = _asked(task)
    if forced_none:
        notes = tuple(f"network: none, forced; the task asks for {mode}" for _, mode in asked)
        return Decision(TaskNetwork(), notes)
    unset = not asked and task.environment.network_mode is None and task.environment.allow_internet is None
    if allowed:
        return _granted(task, findings, unset=unset)
    for path, mode in asked:
        findings.refuse(path, f"network {mode!r}", _REMEDY)
    if unset:
        note = "network: none, since the task names no network mode (in Harbor it would be public)"
        findings.warn(("environment",), note, 'say `network_mode = "no-network"`', rule="network-unset")
        return Decision(TaskNetwork(), (note,))
    return Decision(TaskNetwork())


def _asked(task: TaskToml) -> list[tuple[KeyPath, str]]:
    """Where the task names a network, and which."""
    asked: list[tuple[KeyPath, str]] = []
    environment = task.environment
    if environment.network_mode in ("public", "allowlist"):
        asked.append((("environment", "network_mode"), environment.network_mode))
    elif environment.allow_internet:
        asked.append((("environment", "allow_internet"), "public"))
    elif environment.allowed_hosts:
        asked.append((("environment", "allowed_hosts"), "allowlist"))
    for phase, table in (("agent", task.agent), ("verifier", task.verifier)):
        if table.network_mode in ("public", "allowlist"):
            asked.append(((phase, "network_mode"), table.network_mode))
        elif table.allowed_hosts:
            asked.append(((phase, "allowed_hosts"), "allowlist"))
    return asked


def _granted(task: TaskToml, findings: Findings, *, unset: bool) -> Decision:
    base = _base(task.environment)
    phases = {}
    for phase, table in (("agent", task.agent), ("verifier", task.verifier)):
        mode: Mode = _MODES[table.network_mode] if table.network_mode else base.mode
        hosts = tuple(table.allowed_hosts or ()) or base.hosts
        if table.allowed_hosts and table.network_mode is None:
            mode = "allowlist"
        phases[phase] = PhaseNetwork(mode, hosts if mode == "allowlist" else ())
    network = TaskNetwork(phases["agent"], phases["verifier"])
    _check_hosts(task, findings)
    why = "in Harbor it would be, and the run allows it" if unset else "as the run allows it"
    if network.is_none:
        return Decision(network)
    return Decision(network, (f"network: agent {network.agent.mode}, verifier {network.verifier.mode}, {why}",))


def _base(environment: EnvironmentTable) -> PhaseNetwork:
    """The environment's own mode; Harbor's default is public."""
    hosts = tuple(environment.allowed_hosts or ())
    if environment.network_mode is not None:
        return PhaseNetwork(_MODES[environment.network_mode], hosts)
    if environment.allow_internet is False:
        return PhaseNetwork("none")
    return PhaseNetwork("allowlist" if hosts else "public", hosts)


def _check_hosts(task: TaskToml, findings: Findings) -> None:
    from proctor.sandbox.net import names

    for where, table in (("environment", task.environment), ("agent", task.agent), ("verifier", task.verifier)):
        for index, host in enumerate(table.allowed_hosts or ()):
            if names.pattern(host) in (None, "*"):
                findings.error((where, "allowed_hosts", index), f"{host!r} is neither a host name nor `*.name.example`")
