"""Namespaces, mounts and files: items 6 to 13."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proctor.sandbox.selftest.checks import REFUSED, Verdict, green, judge

if TYPE_CHECKING:
    from proctor.sandbox.selftest.checks import Hall, View
    from proctor.sandbox.selftest.facts import Facts

_CLOSED: Final = REFUSED | {"ENOENT", "EROFS", "ENXIO", "ENOTDIR", "ENODEV", "EIO"}
_OWN: Final = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
_DEVICES: Final = frozenset({"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/ptmx", "console"})
_DEVICE_PLACES: Final = frozenset({"fd", "stdin", "stdout", "stderr", "pts", "shm", "mqueue", "core"})


def namespaces(facts: Facts, view: View) -> Verdict:
    """Every namespace is the sandbox's own."""
    found = facts.group("ns.")
    own = tuple(kind for kind in _OWN if not (kind == "net" and view.network == "open"))
    if view.runtime == "runsc":
        return green("a kernel of its own: its namespaces are gVisor's, those of its process are item 1's and native's")
    wrong = {kind: found.get(kind, "?") for kind in own if found.get(kind, "?") in (view.namespaces.get(kind), "?")}
    shared = "" if len(own) == len(_OWN) else "; net is the machine's, as asked for by the word open"
    return judge(wrong, f"{', '.join(own)} differ from the machine's{shared}; the time namespace is shared")


def mount_table(facts: Facts, view: View) -> Verdict:
    """Nothing spreads to or from the machine's mounts, and none of its paths can be read."""
    wrong: dict[str, str] = {}
    tables = [line.split() for line in facts.many("mount")]
    for words in tables:
        root, target, optional = words[3], words[4], words[6 : words.index("-")]
        if any(word.startswith(("shared:", "master:")) for word in optional):
            wrong[target] = f"propagation {' '.join(optional)}"
        for secret in view.secrets:
            if target not in view.mounts and (secret in root or secret in " ".join(words[words.index("-") :])):
                wrong[target] = f"shows {secret}"
        if view.runtime == "native" and "ro" not in words[5].split(",") and not _may_be_written(words):
            wrong[target] = "can be written"
    roots = sum(words[4] == "/" for words in tables)
    if roots != 1:
        wrong["/"] = f"{roots} mounts"
    return judge(wrong, f"{len(tables)} mounts, all private; no path of the machine's stores among them")


def _may_be_written(words: list[str]) -> bool:
    return words[4] in ("/", "/proc", "/dev/pts", "/dev/shm")


def _missing(facts: Facts, view: View, *targets: str) -> dict[str, str]:
    """Places of a native sandbox that nothing is mounted over read-only."""
    if view.runtime != "native":
        return {}
    covered = {words[4] for words in map(str.split, facts.many("mount")) if "ro" in words[5].split(",")}
    return {target: "not mounted read-only" for target in targets if target not in covered}


def proc(facts: Facts, view: View) -> Verdict:
    """What /proc says of the machine is masked, and its settings cannot be written."""
    read = {key: value for key, value in facts.group("read.").items() if key.startswith("/proc/")}
    write = {key: value for key, value in facts.group("write.").items() if key.startswith("/proc/")}
    del write["/proc/self/attr/current"]  # one's own label, where there is none
    wrong = {key: value for key, value in read.items() if value not in _CLOSED | {"empty"}}
    wrong |= {f"write {key}": value for key, value in write.items() if value not in _CLOSED}
    if view.runtime == "runsc":
        wrong = {key: value for key, value in wrong.items() if not key.startswith("write ")}
        return judge(wrong, f"{len(read)} files absent or empty; the settings are those of gVisor's own kernel")
    wrong |= _missing(facts, view, "/proc/sys", "/proc/bus", "/proc/fs", "/proc/irq")
    return judge(
        wrong,
        f"{len(read)} files masked or absent, {len(write)} not writable; no hidepid: one trust domain",
    )


def sys(facts: Facts, view: View) -> Verdict:
    """/sys is empty, and no control group can be reached."""
    read = {key: value for key, value in facts.group("read.").items() if key.startswith("/sys/")}
    write = {key: value for key, value in facts.group("write.").items() if key.startswith("/sys/")}
    wrong = {key: value for key, value in read.items() if value not in _CLOSED | {"empty"}}
    if view.runtime == "runsc":
        for key in ("/sys/devices", "/sys/kernel", "/sys/block", "/sys/fs/cgroup"):
            wrong.pop(key, None)  # gVisor's own, made up
    wrong |= {f"write {key}": value for key, value in write.items() if value not in _CLOSED}
    wrong |= _missing(facts, view, "/sys")
    return judge(wrong, f"{len(read)} places empty or absent, {len(write)} not writable")


def devices(facts: Facts, view: View) -> Verdict:
    """/dev has the harmless devices only, and no other can be made."""
    wrong: dict[str, str] = {}
    own = frozenset({"net", "net/tun", "fuse"}) if view.runtime == "runsc" else frozenset()
    for entry in facts.many("dev"):
        kind, _, path = entry.partition(" ")
        name = path.removeprefix("/dev/")
        if name in own:
            continue
        if kind in "cb" and name not in _DEVICES and not name.removeprefix("pts/").isdigit():
            wrong[path] = "a device"
        elif kind not in "cb" and name not in _DEVICES | _DEVICE_PLACES and not name.startswith(("shm/", "mqueue/")):
            wrong[path] = f"kind {kind}"
    made = facts.group("mknod.")
    wrong |= {f"mknod {key}": value for key, value in made.items() if value not in _CLOSED}
    opened = {key: value for key, value in facts.group("read.").items() if key.startswith("/dev/")}
    closed = _CLOSED | ({"EBADFD"} if own else frozenset())
    wrong |= {key: value for key, value in opened.items() if value not in closed}
    wrong |= _missing(facts, view, "/dev")
    return judge(wrong, f"{len(facts.many('dev'))} entries, {len(made)} nodes refused, {len(opened)} devices absent")


def attributes(facts: Facts, view: View) -> Verdict:
    """The attributes by which layers speak to an overlay cannot be set."""
    tried = facts.group("attribute.")
    wrong = {key: value for key, value in tried.items() if value not in _CLOSED | {"EOPNOTSUPP"}}
    overlay = next((line for line in facts.many("mount") if " overlay " in line), "")
    if view.runtime == "native" and "redirect_dir=nofollow" not in overlay and "redirect_dir=off" not in overlay:
        wrong["overlay"] = "redirect_dir is followed"
    if "metacopy=on" in overlay:
        wrong["overlay"] = "metacopy=on"
    return judge(wrong, f"{len(tried)} attributes refused; redirect_dir=nofollow, no metacopy")


async def forged_layers(hall: Hall) -> Verdict:
    """`user.overlay.*` on a directory hides or moves nothing once its layer is frozen."""
    async with await hall.edge.create(hall.spec()) as box:
        await box.exec("mkdir -p /forged/below && echo x > /forged/below/file", user="0")
        await box.snapshot()
        probe = await hall.place(box)
        answer = (await box.exec([probe, "burden", "forge", "/forged/below"], user="0")).text.strip()
        await box.snapshot()
        listed = (await box.exec(["/bin/ls", "/forged/below"])).text.split()
    wrong = [] if "file" in listed else [f"after user.overlay.opaque ({answer}) a file below is gone"]
    return judge(wrong, f"setting user.overlay.opaque: {answer}; what lies below still shows after a snapshot")


def descriptors(facts: Facts, view: View) -> Verdict:
    """Nothing but the three standard streams is inherited, and the working directory is inside."""
    wrong = {f"descriptor {entry}": "inherited" for entry in facts.many("descriptor")}
    if not facts.one("cwd").startswith("/"):
        wrong["cwd"] = facts.one("cwd")
    return judge(wrong, f"1,021 numbers looked at, none open; cwd {facts.one('cwd')}")


def ways_out(facts: Facts, view: View) -> Verdict:
    """Climbing from mounts, and leaving a chroot, end at the sandbox's own root."""
    tried = facts.group("climb.")
    # EPERM and ENOENT: who may not chroot, or make a directory in /, cannot even try.
    fine = {"root", "ok", "EPERM", "EACCES"}
    if view.runtime == "runsc":
        fine.add("ENODATA")  # an empty directory below gVisor's own root
    wrong = {key: value for key, value in tried.items() if value not in fine}
    if len(tried) < 5:
        wrong["attempts"] = f"only {len(tried)}"
    return judge(wrong, f"{len(tried)} climbs end at the root; chroot: {tried.get('chroot', '?')}")
