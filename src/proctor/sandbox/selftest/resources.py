"""Resources: items 14 to 25. Each limit is exceeded, and has to hold and to be named."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio

from proctor.sandbox.contract import EndReason, OutputLimit, SandboxLost
from proctor.sandbox.selftest.checks import Verdict, green, judge, not_applicable, red

if TYPE_CHECKING:
    from proctor.sandbox.box import Box
    from proctor.sandbox.contract import ExecResult
    from proctor.sandbox.selftest.checks import Hall, View
    from proctor.sandbox.selftest.facts import Facts

_CPUS: Final = 0.1
_SPIN_MS: Final = 1500
_FLOOD_MB: Final = 16
_DEEP: Final = 10_000


async def _burden(hall: Hall, *words: str, **fields: Any) -> tuple[ExecResult | None, EndReason | None, bool]:
    """Run a load in a sandbox of its own: its result, why it or the sandbox ended, and whether the sandbox lives on."""
    async with await hall.edge.create(hall.spec(**fields)) as box:
        probe = await hall.place(box)
        try:
            result = await box.exec([probe, "burden", *words], cwd="/", user="0", timeout_s=40)
        except SandboxLost as lost:
            return None, lost.reason, False
        return result, result.reason, await _lives(box)


async def _lives(box: Box) -> bool:
    with suppress(SandboxLost):
        return (await box.exec(["/bin/true"], timeout_s=20)).ok
    return False


async def fork_bomb(hall: Hall) -> Verdict:
    """More processes than allowed are refused, and that is said."""
    result, reason, lives = await _burden(hall, "forks", "200", resources={"pids": 24})
    said = result.text.strip() if result is not None else "lost"
    held = reason is EndReason.PIDS and (lives or hall.runtime == "runsc")
    return judge(
        [] if held else [f"{said}, reason {reason}"], f"of 200 children at pids 24: {said}, reason PIDS; it lives"
    )


async def memory_bomb(hall: Hall) -> Verdict:
    """More memory than allowed ends what asked for it, and that is said."""
    result, reason, lives = await _burden(hall, "memory", "512", resources={"memory_mb": 96, "disk_mb": 16})
    held = reason is EndReason.OOM and (lives or hall.runtime == "runsc")
    after = "the sandbox lives" if lives else "the sandbox ended with it"
    said = result.text.strip() if result is not None else "lost"
    return judge([] if held else [f"512 MB at 96: {said}, reason {reason}"], f"512 MB at 96: reason OOM, {after}")


async def shared_memory(hall: Hall) -> Verdict:
    """/dev/shm holds no more than memory allows."""
    result, reason, _ = await _burden(hall, "fill", "/dev/shm/x", "100", resources={"memory_mb": 256, "disk_mb": 16})
    said = result.text.strip() if result is not None else "lost"
    held = reason is EndReason.OOM or (re.match(r"\d+ (ENOSPC|ENOMEM)", said) and int(said.split()[0]) <= 64)
    return judge(
        [] if held else [f"/dev/shm took {said}"],
        f"of 100 MB at 256 MB of memory it took {said or 'none'}, reason {reason}",
    )


async def disk_bytes(hall: Hall) -> Verdict:
    """No more bytes than allowed can be written."""
    result, _, lives = await _burden(hall, "fill", "/full", "200", resources={"disk_mb": 24})
    said = result.text.strip() if result is not None else "lost"
    held = said.endswith("ENOSPC") and int(said.split()[0]) <= 24 and lives
    return judge([] if held else [f"200 MB at 24: {said}"], f"200 MB at 24: {said}")


async def disk_inodes(hall: Hall) -> Verdict:
    """No more files than allowed can be made."""
    result, _, lives = await _burden(hall, "files", "/many", "5000", resources={"disk_inodes": 500})
    said = result.text.strip() if result is not None else "lost"
    held = said.endswith("ENOSPC") and int(said.split()[0]) <= 500 and lives
    return judge([] if held else [f"5,000 files at 500: {said}"], f"5,000 files at 500: {said}")


async def hoards(hall: Hall) -> Verdict:
    """What the machine counts for everybody is bounded for each."""
    result, reason, lives = await _burden(hall, "hoard")
    if result is None or not result.stdout.data:
        return judge([] if reason is EndReason.OOM else ["it was lost"], "its own memory limit ended it first")
    held = dict(line.split("\t") for line in result.text.splitlines() if "\t" in line)
    wrong = {name: said for name, said in held.items() if said.endswith(" ok")}
    if hall.runtime == "runsc":
        wrong = {}  # all of them are memory of gVisor's process, which is limited
    if not lives and hall.runtime != "runsc":
        wrong["sandbox"] = "gone"
    return judge(wrong, ", ".join(f"{name} {said}" for name, said in held.items()) + "; namespaces and keys: item 4")


async def cpu_time(hall: Hall) -> Verdict:
    """CPU bandwidth is limited."""
    async with await hall.edge.create(hall.spec(resources={"cpus": _CPUS})) as box:
        probe = await hall.place(box)
        before = (await box.stats()).cpu_s
        await box.exec([probe, "burden", "spin", str(_SPIN_MS)], timeout_s=40)
        used = (await box.stats()).cpu_s - before
        periods = re.search(r"^nr_periods (\d+)", await _group_file(box, "cpu", "cpu.stat"), re.MULTILINE)
    words = f"{_SPIN_MS} ms of spinning at {_CPUS:g} cores took {used:.2f} s of CPU time"
    if periods is not None and periods[1] == "0":
        return red(f"{words}, and the kernel limits no bandwidth")  # whatever else the machine was busy with
    return judge([] if used <= _CPUS * _SPIN_MS / 1000 + 0.15 else [words], words)


async def _group_file(box: Box, controller: str, name: str) -> str:
    """A file of the sandbox's control group; empty where there is none to be seen."""
    group = getattr(box._live, "group", None)
    folder = group.directory(controller) if group is not None else None
    with suppress(OSError):
        return await (anyio.Path(folder) / name).read_text() if folder is not None else ""
    return ""


def processors(facts: Facts, view: View) -> Verdict:
    """As many processors are shown as there are to use, rounded up."""
    shown = facts.one("cpus")
    if view.cpus is None or not shown.isdigit():
        return red(f"it shows {shown}")
    if view.runtime == "runsc":
        return not_applicable(f"gVisor shows the machine's ({shown}); the limit holds all the same")
    words = f"{view.cpus:g} cores, nproc {shown}; memory is shown as the machine has it: no kernel interface hides it"
    return judge([] if int(shown) <= math.ceil(view.cpus) else [words], words)


async def flood(hall: Hall) -> Verdict:
    """A flood of output is kept within bounds and counted."""
    limit = OutputLimit(1 << 16, 1 << 16)
    async with await hall.edge.create(hall.spec()) as box:
        probe = await hall.place(box)
        result = await box.exec([probe, "burden", "flood", str(_FLOOD_MB)], limit=limit, timeout_s=40)
    kept, total = len(result.stdout.head) + len(result.stdout.tail), result.stdout.total
    held = total == _FLOOD_MB << 20 and kept <= 1 << 17
    words = f"{total} bytes written, {kept} kept, {result.stdout.dropped} counted as dropped"
    return judge([] if held else [words], words)


async def odd_bytes(hall: Hall) -> Verdict:
    """A line of a megabyte, NUL and invalid UTF-8 arrive as they are."""
    async with await hall.edge.create(hall.spec()) as box:
        probe = await hall.place(box)
        result = await box.exec([probe, "burden", "odd-bytes"], timeout_s=40)
    data = result.stdout.data
    held = data.startswith(b"l" * (1 << 20)) and data.endswith(b"\0\xff\xfe\xc3(\xed\xa0\x80\x1b[2J\r\n")
    return judge([] if held else [f"{len(data)} bytes, ending {data[-12:]!r}"], f"{len(data)} bytes, all the same")


async def deep_tree(hall: Hall) -> Verdict:
    """Ten thousand directories in each other are removed again."""
    words = ("burden", "deep", str(_DEEP))
    async with await hall.edge.create(hall.spec(resources={"disk_inodes": _DEEP + 2000})) as box:
        probe = await hall.place(box)
        await box.mkdir("/deep")
        try:
            made = (await box.exec([probe, *words], cwd="/deep", user="0", timeout_s=40)).text.strip()
            start = anyio.current_time()
            await box.remove("/deep", recursive=True)
        except SandboxLost as lost:
            if hall.runtime != "runsc":
                raise
            return green(
                f"{_DEEP} levels are too many for gVisor: they end their sandbox ({lost.reason}) and nothing else"
            )
        took = anyio.current_time() - start
    return green(f"{made} levels, removed in {took:.2f} s; a million files: bench and fault tests")


async def swap(hall: Hall) -> Verdict:
    """Nothing of a sandbox is swapped beyond its memory limit."""
    async with await hall.edge.create(hall.spec()) as box:
        names = ("memory.swap.max", "memory.memsw.limit_in_bytes", "memory.limit_in_bytes")
        facts = {name: text.strip() for name in names if (text := await _group_file(box, "memory", name))}
    memory = await anyio.Path("/proc/meminfo").read_text()
    free = next(line for line in memory.splitlines() if line.startswith("SwapTotal"))
    if facts.get("memory.swap.max") == "0":
        return green("memory.swap.max 0")
    if "memory.memsw.limit_in_bytes" in facts:
        same = facts["memory.memsw.limit_in_bytes"] == facts.get("memory.limit_in_bytes")
        return judge([] if same else [str(facts)], "memory and swap together are limited to the memory limit")
    if free.split()[1] == "0":
        return green("the machine has no swap, and the kernel accounts none")
    return red(f"{free}, and the kernel does not account swap here")


async def hard_kill(hall: Hall) -> Verdict:
    """A sandbox full of processes that ignore every signal is gone within a second."""
    took = math.inf
    for _ in range(2):  # a busy machine may be late once
        box = await hall.edge.create(hall.spec())
        probe = await hall.place(box)
        await box.start([probe, "burden", "stubborn"], keep=True)
        await anyio.sleep(0.1)
        start = anyio.current_time()
        await box.close()
        took = min(took, anyio.current_time() - start)
        if took < 1:
            break
    words = f"closed in {took * 1000:.0f} ms; one that cannot be killed is reported (state D)"
    return judge([] if took < 1 else [words], words)
