"""The integrity of the evaluation, as far as the room can show it: items 41 and 46."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio

from proctor.sandbox.selftest.checks import REFUSED, Verdict, judge

if TYPE_CHECKING:
    from proctor.sandbox.selftest.checks import Hall, View
    from proctor.sandbox.selftest.facts import Facts

_ADVISED: Final = {
    "vm.unprivileged_userfaultfd": 0,
    "kernel.io_uring_disabled": 2,
    "kernel.unprivileged_bpf_disabled": 1,
    "kernel.yama.ptrace_scope": 1,
    "kernel.kptr_restrict": 1,
    "kernel.dmesg_restrict": 1,
}
"""Settings of a careful machine, at least. None is relied upon: the filter and the masks of items 4, 5 and 8 say the
same to sandboxes, whatever the machine is set to."""


def guest_binary(facts: Facts, view: View) -> Verdict:
    """The guest's program can neither be read nor written, and nothing inside names it."""
    tried = {name: facts.one(f"one.{name}") for name in ("exe", "exe-write", "mem", "fd")}
    wrong = {name: answer for name, answer in tried.items() if answer not in REFUSED | {"ENOENT"}}
    if any("proctor-init" in line or "_bin" in line for line in facts.many("mount")):
        wrong["mounts"] = "name the guest's program"
    if view.runtime == "runsc":
        # gVisor executes it, so there is a file; the guest has unmounted it, and nobody can write it.
        wrong = {name: answer for name, answer in wrong.items() if name == "exe-write" and answer == "ok"}
    return judge(wrong, "process 1's program, memory and descriptors refused; verdicts come from a room of their own")


def core_limit(facts: Facts, view: View) -> Verdict:
    """A crash inside starts no program of the machine."""
    limit = facts.one("limit.core")
    if view.runtime == "runsc":
        return judge([], "gVisor writes no core files and starts no helper")
    return judge([] if limit == "1" else [f"RLIMIT_CORE {limit}"], "RLIMIT_CORE 1: no core_pattern helper is started")


async def machine(hall: Hall) -> Verdict:
    """What the machine is set to, for the record."""
    found = {}
    for name in _ADVISED:
        with suppress(OSError, ValueError):
            found[name] = int(await anyio.Path("/proc/sys", *name.split(".")).read_text())
    loose = [f"{name}={value}" for name, value in found.items() if value < _ADVISED[name]]
    if found.get("vm.unprivileged_userfaultfd", 0) > 0:
        loose.append("vm.unprivileged_userfaultfd=1")
    core = resource.getrlimit(resource.RLIMIT_CORE)[0]
    shown = (
        f"looser than advised: {', '.join(loose)} (the filter refuses what they would allow)" if loose else "as advised"
    )
    return judge([], f"settings {shown}; core limit of the Edge {core}")
