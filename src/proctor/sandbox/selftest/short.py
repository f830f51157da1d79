"""The short form: one run of the probe in a sandbox that is about to be handed out, as root, who could do the most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.common import ProctorError
from proctor.sandbox.contract import FileError, LaunchError, OutputLimit
from proctor.sandbox.selftest import probing
from proctor.sandbox.selftest.checklist import ITEMS, VERSION

if TYPE_CHECKING:
    from proctor.sandbox.contract import SandboxSpec
    from proctor.sandbox.native.channel import GuestChannel
    from proctor.sandbox.selftest.checks import View
    from proctor.sandbox.selftest.facts import Facts

_LIMIT = OutputLimit(head_bytes=1 << 20, tail_bytes=0)


async def self_test(channel: GuestChannel, spec: SandboxSpec, pid: int | None) -> dict[str, Any]:
    """Try it, and say for the receipt what was looked at. The sandbox is left as it was.

    Raises LaunchError, which names the items, when one is red or the probe cannot run: what is not known to hold does
    not hold.
    """
    probe = probing.place_name()
    try:
        await channel.write(probe, probing.binary(), mode=0o755)
        try:
            ran = await channel.exec(
                [probe, "brief"], env={}, cwd="/", user="0:0", timeout_s=probing.REPORT_S, limit=_LIMIT, login_env=False
            )
        finally:
            await channel.remove(probe)
        return judged(probing.read(ran), probing.view(spec, pid))
    except LaunchError:
        raise
    except (ProctorError, FileError) as error:
        raise LaunchError(f"the self-test could not be carried out: {error.message}", remedy=error.remedy) from error


def judged(facts: Facts, view: View) -> dict[str, Any]:
    """What the receipt says. Raises LaunchError when an item is red."""
    counts = {"green": 0, "n/a": 0}
    wrong: list[str] = []
    for item in ITEMS:
        for check in item.facts:
            verdict = check(facts, view)
            if verdict.status == "red":
                wrong.append(f"{item.number} ({item.title}): {verdict.evidence}")
            else:
                counts[verdict.status] += 1
    if wrong:
        raise LaunchError(
            f"the self-test is red in {'; '.join(wrong)}", remedy="see proctor doctor --isolation; nothing was started"
        )
    return {"version": VERSION, "form": "short", **counts, "red": 0}
