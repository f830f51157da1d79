"""Identity and privilege: items 1 to 5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proctor.sandbox.selftest.checks import REFUSED, Verdict, green, judge, red

if TYPE_CHECKING:
    from proctor.sandbox.selftest.checks import Hall, View
    from proctor.sandbox.selftest.facts import Facts

_FORBIDDEN: Final = {
    "SYS_MODULE": 16, "SYS_RAWIO": 17, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_BOOT": 22, "NET_ADMIN": 12,
    "DAC_READ_SEARCH": 2, "MKNOD": 27, "SYSLOG": 34, "PERFMON": 38, "BPF": 39, "CHECKPOINT_RESTORE": 40,
}  # fmt: skip
_FLOOR = 65536
"""Below this are the ids of the machine's own users."""


def ids(facts: Facts, view: View) -> Verdict:
    """Root inside is nobody outside."""
    ranges = []
    for key in ("uid_map", "gid_map"):
        words = facts.one(key).split()
        if len(words) < 3 or len(words) % 3 or not all(word.isdigit() for word in words):
            return red(f"{key} says {facts.one(key)!r}")
        ranges.append([tuple(map(int, words[at : at + 3])) for at in range(0, len(words), 3)])
    root = next((outside for inside, outside, _ in ranges[0] if inside == 0), None)
    if root is not None and root >= _FLOOR:
        return green(f"uid 0 inside is {root} outside; {sum(size for _, _, size in ranges[0])} ids are mapped")
    if view.runtime == "runsc" and view.host_ids and min(view.host_ids) >= _FLOOR:
        return green(f"gVisor runs as {', '.join(map(str, sorted(set(view.host_ids))))} on the machine")
    return red(f"uid_map is {facts.one('uid_map')!r}: root inside is {root} outside")


def capabilities(facts: Facts, view: View) -> Verdict:
    """The capabilities are the declared ones, and none of the dangerous."""
    sets = facts.group("status.Cap")
    held = {name: int(value, 16) for name, value in sets.items() if value != "?"}
    if view.runtime == "runsc" and {"Prm", "Eff", "Bnd"} <= held.keys():
        excess = {f"Cap{name}": f"{value:x}" for name, value in held.items() if value & ~view.capabilities}
        return judge(
            excess, f"CapEff {held['Eff']:x}, CapBnd {held['Bnd']:x}: some of the declared ones, in gVisor alone"
        )
    if len(held) != 5:
        return red(f"only {sorted(held)} are known")
    wanted = {"Inh": 0, "Amb": 0, "Bnd": view.capabilities}
    wanted |= dict.fromkeys(("Prm", "Eff"), view.capabilities if view.as_root else 0)
    wrong = {f"Cap{name}": f"{held[name]:x}, not {value:x}" for name, value in wanted.items() if held[name] != value}
    dangerous = [name for name, bit in _FORBIDDEN.items() if held["Bnd"] >> bit & 1]
    if dangerous:
        wrong["bounding set"] = f"has {', '.join(dangerous)}"
    return judge(wrong, f"CapEff {held['Eff']:x}, CapBnd {held['Bnd']:x}, none of {len(_FORBIDDEN)} dangerous ones")


def no_new_privileges(facts: Facts, view: View) -> Verdict:
    """No program gains privileges, and mounts neither carry set-uid bits nor devices."""
    wrong: dict[str, str] = {}
    if facts.one("status.NoNewPrivs") != "1":
        wrong["NoNewPrivs"] = facts.one("status.NoNewPrivs")
    tables = [line.split() for line in facts.many("mount")]
    for words in tables:
        flags = words[5].split(",")
        is_device_directory = words[4] == "/dev" or words[4].startswith(("/dev/", "/proc/")) or words[-1] == "none"
        if "nosuid" not in flags:
            wrong[words[4]] = "mounted without nosuid"
        elif "nodev" not in flags and not is_device_directory:
            wrong[words[4]] = "mounted without nodev"
    if view.runtime == "runsc":
        return green("gVisor does not say, so it is tried")
    return judge(wrong, f"NoNewPrivs 1; {len(tables)} mounts nosuid, all but /dev nodev")


async def gain(hall: Hall) -> Verdict:
    """A set-uid root program that an ordinary user starts stays that user's."""
    async with await hall.edge.create(hall.spec()) as box:
        probe = await hall.place(box)
        result = await box.exec([probe, "burden", "gain", probe], user="0", timeout_s=20)
    said = result.text.strip() or result.error_text.strip()
    return judge([] if said == "65534 65534" else [f"it says {said!r}"], "set-uid root, started by 65534: 65534 65534")


_OF_GVISOR: Final = frozenset(
    {"io_setup", "keyctl", "syslog", "unshare-user", "unshare-time", "clone-10000000", "clone-20000"}
)
"""Calls that gVisor carries out by itself: namespaces, keys and logs of its own kernel, which ends with the sandbox."""


def _answered_by_gvisor(attempts: dict[str, str]) -> Verdict:
    wrong = {name: answer for name, answer in attempts.items() if answer == "ok" and name not in _OF_GVISOR}
    own = sorted(name for name in _OF_GVISOR if attempts.get(name) == "ok")
    return judge(
        wrong, f"of {len(attempts)} calls and sockets gVisor's own kernel carries out {', '.join(own)}; all others fail"
    )


def calls(facts: Facts, view: View) -> Verdict:
    """The filter is on, and what it must refuse is refused."""
    attempts = facts.group("call.") | {f"socket {key}": value for key, value in facts.group("socket.").items()}
    refused = REFUSED
    if view.network == "open":
        # Sockets of the machine's own network: raw ones are refused by their capability there.
        refused = REFUSED | {"EADDRNOTAVAIL"}
    if view.runtime == "runsc":
        return _answered_by_gvisor(attempts)
    wrong = {name: answer for name, answer in attempts.items() if answer not in refused}
    controls = facts.group("ioctl.")
    wrong |= {name: answer for name, answer in controls.items() if answer not in REFUSED | {"ENOTTY"}}
    if facts.one("status.Seccomp") != "2":
        wrong["Seccomp"] = facts.one("status.Seccomp")
    if len(attempts) < 50 or len(controls) < 8:
        wrong["attempts"] = f"only {len(attempts)} and {len(controls)} were made"
    foreign = ", ".join(f"{name} {attempts[name]}" for name in ("i386", "x32") if name in attempts)
    return judge(wrong, f"{len(attempts)} calls and sockets and {len(controls)} ioctls refused; {foreign}")


def process_one(facts: Facts, view: View) -> Verdict:
    """Process 1, the guest, can neither be looked into nor touched."""
    tried = facts.group("one.")
    fine = REFUSED | {"ENOENT", "ESRCH"}
    wrong = {name: answer for name, answer in tried.items() if answer not in fine and name not in ("kill", "alive")}
    if tried.get("alive") != "ok":
        wrong["alive"] = tried.get("alive", "?")
    if view.runtime == "runsc":
        shown = ("environ", "maps", "auxv", "io", "ns/mnt", "ns/user", "affinity")
        wrong = {name: answer for name, answer in wrong.items() if name not in shown and answer not in ("empty", "EIO")}
        return judge(wrong, f"memory, descriptors, program and tracing refused; gVisor shows {', '.join(shown)}")
    return judge(wrong, f"{len(tried) - 2} attempts on process 1 refused; it lives after SIGKILL")
