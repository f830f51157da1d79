"""The network of a run's sandboxes: none, unless the run was told otherwise, and then by phase and on record.

`--allow-network asked` gives each task what it asks for (or what Harbor would give it): every public name, or its list.
`--allow-network FILE` is a ceiling: a policy document that says what may be reached at most, and where internal names
are. Services and internal addresses are reached by no task of itself. What was granted is in the lock, so that scores
with and without a network are never compared by accident.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError
from proctor.sandbox.net import NetworkPolicy, Rule, names
from proctor.tasks.network import online_env

if TYPE_CHECKING:
    from proctor.sandbox.contract import Sandbox, SandboxSpec
    from proctor.tasks.network import PhaseNetwork

ASKED = "asked"
_EVERYTHING = (Rule("*"),)


@dataclass(frozen=True, slots=True)
class NetworkGrant:
    """What a run lets its tasks reach at most."""

    ceiling: NetworkPolicy

    @classmethod
    def parse(cls, text: str) -> NetworkGrant:
        """From the option's text: `asked`, or the path of a policy document with mode `allow`."""
        if text == ASKED:
            return cls(NetworkPolicy("allow", _EVERYTHING))
        try:
            content = Path(text).read_bytes()
        except OSError as error:
            remedy = f"{ASKED}, or the path of a policy document"
            raise ConfigError(f"{text}: {error.strerror}", field="--allow-network", remedy=remedy) from error
        policy = NetworkPolicy.parse(content, field=text)
        if policy.mode != "allow":
            raise ConfigError(f"is mode {policy.mode!r}, not `allow`", field=f"{text}: mode",
                              remedy="a run that allows nothing needs no --allow-network")  # fmt: skip
        return cls(policy)

    def as_json(self) -> dict[str, Any]:
        """As the lock holds it."""
        return self.ceiling.as_json()

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> NetworkGrant:
        """From a lock."""
        return cls(NetworkPolicy.from_json(document, field="run.json: network"))

    def policy(self, asked: PhaseNetwork) -> NetworkPolicy:
        """What a phase gets: what it asks for, as far as the ceiling reaches."""
        if asked.mode == "none":
            return NetworkPolicy()
        if asked.mode == "public":
            return self.ceiling
        rules = tuple(rule for host in asked.hosts for rule in self._below(names.pattern(host) or host))
        return NetworkPolicy("allow", rules, self.ceiling.trust) if rules else NetworkPolicy()

    def _below(self, host: str) -> list[Rule]:
        """The ceiling's rules for one host of a list: the wider of the two gives way."""
        found = []
        for rule in self.ceiling.rules:
            if rule.host == "*" or rule.host == host or _covers(rule.host, host):
                found.append(replace(rule, host=host))
            elif _covers(host, rule.host):
                found.append(rule)
        return found


def _covers(wide: str, narrow: str) -> bool:
    return wide.startswith("*.") and names.matches(wide, narrow.removeprefix("*."))


def policy_for(grant: NetworkGrant | None, asked: PhaseNetwork) -> NetworkPolicy | None:
    """The policy of a phase; None: its sandbox needs no carried network."""
    if grant is None or asked.mode == "none":
        return None
    return grant.policy(asked)


def with_network(spec: SandboxSpec, network: NetworkPolicy | None, *, online: bool) -> SandboxSpec:
    """The spec of a sandbox with this policy (None: as it is). `online`: its package managers may use the network."""
    if network is None:
        return spec
    env = online_env(spec.image.env) if online and not isinstance(spec.image, str) else {}
    return replace(spec, network=network, env={**env, **spec.env})


async def enter_phase(box: Sandbox, policy: NetworkPolicy | None, phase: str) -> None:
    """Change the network of a sandbox that has one, at once and as a whole; the records name the phase from here on."""
    if policy is not None:
        await box.set_network(policy, phase=phase)
