"""Carried, not connected: what a sandbox may reach, checked, answered and recorded on the host (docs/network.md).

`NetworkPolicy` and `Rule` say what may be reached, `Service` answers a name, `Secret` is held inside only as a token,
`FaultProfile` breaks things on purpose, and `NetworkEvent` is one line of the record.
"""

from __future__ import annotations

from proctor.sandbox.net import names
from proctor.sandbox.net.events import NetworkEvent, OnNetwork
from proctor.sandbox.net.faults import Fault, FaultProfile
from proctor.sandbox.net.policy import NetworkPolicy, Rule
from proctor.sandbox.net.secrets import Secret
from proctor.sandbox.net.services import Service, Visit

__all__ = [
    "Fault",
    "FaultProfile",
    "NetworkEvent",
    "NetworkPolicy",
    "OnNetwork",
    "Rule",
    "Secret",
    "Service",
    "Visit",
    "names",
]
