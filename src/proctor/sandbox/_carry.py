"""From what a caller of `Edge.create` gives for the network to the boundary of each sandbox that is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from proctor.common import RefusedError
from proctor.sandbox._plans import is_open

if TYPE_CHECKING:
    from proctor.sandbox.contract import SandboxSpec
    from proctor.sandbox.net.boundary import Boundary, Spawn
    from proctor.sandbox.net.dialer import Dialer
    from proctor.sandbox.net.events import OnNetwork
    from proctor.sandbox.net.faults import FaultProfile
    from proctor.sandbox.net.secrets import Secret
    from proctor.sandbox.net.services import Service

Carry = Callable[[str, "Spawn"], "Boundary"]
"""Makes the boundary of the sandbox with this id."""


def carried(
    spec: SandboxSpec,
    services: Mapping[str, Service] | None,
    secrets: Mapping[str, Secret] | None,
    faults: FaultProfile | None,
    on_network: OnNetwork | None,
    dialer: Callable[[], Dialer],
) -> Carry | None:
    """How to make boundaries for `spec`; None: the sandbox has no carried network. Refuses what cannot be carried."""
    if is_open(spec):
        for name, given in (("services", services), ("secrets", secrets), ("faults", faults)):
            if given:
                raise RefusedError(
                    f"a sandbox with an open network has no {name}",
                    field=name,
                    remedy="give it a NetworkPolicy instead of open",
                )
        return None
    if spec.network == "none" and not services and not secrets:
        return None
    from proctor.sandbox.net.boundary import Boundary, Network, as_policy

    policy = as_policy(spec.network)
    network = Network(services or {}, secrets or {}, faults, on_network)
    return lambda box_id, spawn: Boundary(box_id, policy, network, spawn=spawn, dialer=dialer())
