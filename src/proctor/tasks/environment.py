"""From a task's environment to an image that trials can start from, before any trial's clock runs.

Build or find the image, add the task's loose files, and scrub the history of the repository that the agent
will work in: an image whose repository cannot be proved clean is not used.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import anyio

from proctor.common import ConfigError, atomic_write, canonical_json, digest_json
from proctor.sandbox.images.manifest import MountRecord
from proctor.sandbox.images.store import EMPTY
from proctor.sandbox.images.tools import silent
from proctor.sandbox.layers import LowerStack
from proctor.tasks.history import ScrubReport, is_unborn, read_history, rewrite_history

if TYPE_CHECKING:
    from proctor.sandbox.contract import Image, Layer
    from proctor.sandbox.images.store import ImageStore, Workspace
    from proctor.sandbox.images.tools import Progress
    from proctor.tasks.model import Task

_PROOF_VERSION = 2
NO_REPOSITORY = '{"repository":false}'
OPAQUE = "trusted.overlay.opaque"
_MAX_ALTERNATES = 8


async def prepare(task: Task, *, store: ImageStore, progress: Progress = silent) -> Image:
    """The image of `task`, built or fetched if need be, with a proven history.

    The proof is in the image's label `history:<path>` (canonical JSON of a ScrubReport); a history that the task
    keeps is counted there, and nothing is changed. Raises ConfigError when
    the task is at fault (a file is missing, a repository cannot be judged) and ImageError when the image is.
    """
    environment = task.environment
    image = await _source_image(task, store, progress)
    if environment.files is not None:
        image = await anyio.to_thread.run_sync(_add_files, task, image, store)
    for path in _repositories(task, image):
        required = path == task.carry.repo and task.base_commit is not None
        if task.history == "scrub":
            work = partial(scrub_image, image, path, store=store, base=task.base_commit, required=required)
        else:
            work = partial(audit_image, image, path, store=store)
        image = await anyio.to_thread.run_sync(work)
    return image


async def _source_image(task: Task, store: ImageStore, progress: Progress) -> Image:
    from proctor.sandbox.images import assets
    from proctor.sandbox.images.build import build_recipe, ensure_image
    from proctor.sandbox.images.debian import RELEASES
    from proctor.sandbox.images.dockerfile import build_dockerfile, find_base
    from proctor.sandbox.images.manifest import is_digest

    environment = task.environment
    if environment.recipe is not None:
        return await build_recipe(environment.recipe, store=store, progress=progress)
    if environment.dockerfile is not None:
        limit = environment.build_timeout_s
        return await build_dockerfile(environment.dockerfile, store=store, progress=progress, timeout_s=limit)
    ref = environment.image
    if ref is None:
        raise ConfigError("no image, recipe or Dockerfile", field=task.name)
    ours = ref == "host" or is_digest(ref) or ref in {f"debian:{name}" for name in RELEASES}
    if ours or assets.recipe_path(ref) is not None:
        return await ensure_image(ref, store=store, progress=progress)
    return await find_base(ref, store=store, progress=progress)


def _repositories(task: Task, image: Image) -> list[str]:
    """Where the agent works: the task's repository, and the directory it starts in."""
    found = [task.carry.repo, task.environment.workdir or image.workdir]
    return list(dict.fromkeys(path for path in found if path is not None and path != "/"))


def scrub_image(image: Image, path: str, *, store: ImageStore, base: str | None = None, required: bool = True) -> Image:
    """`image` with only the base commit's past in the repository at `path`; see `proctor.tasks.history`.

    An image that is clean is returned with the proof as a label; otherwise one more layer replaces the git
    directory and deletes what it borrowed objects from. A plain directory has no history, and the label says
    so; it is an error when a repository is `required`. What was proved once for an image is remembered beside it.
    """
    key = digest_json([_PROOF_VERSION, image.digest, path, base, required]).removeprefix("sha256:")
    memory = store.root / "cache" / f"history-{key}.json"
    known = _recall(memory, image, store)
    if known is not None:
        return known
    scrubbed = _scrub_image(image, path, store=store, base=base, required=required)
    labels = {name: text for name, text in scrubbed.labels.items() if image.labels.get(name) != text}
    added = scrubbed.layers[-1].digest if len(scrubbed.layers) > len(image.layers) else None
    atomic_write(memory, canonical_json({"layer": added, "labels": labels}))
    return scrubbed


def audit_image(image: Image, path: str, *, store: ImageStore) -> Image:
    """`image` unchanged, with what its repository at `path` holds beyond the past of HEAD counted in the label."""
    with LowerStack(image.layers) as stack, store.workspace() as workspace:
        workspace.hold(image.layers)
        try:
            copied = _copy_repository(stack, path, workspace)
            if copied is None:
                label = NO_REPOSITORY
            else:
                history = read_history(copied.gitdir)
                facts = {"kept": True, "head": history.head, "objects": history.objects}
                facts |= {"foreign_objects": len(history.foreign), "foreign_refs": list(history.foreign_refs)}
                label = canonical_json(facts).decode()
        except ConfigError as error:
            label = canonical_json({"kept": True, "not_judged": error.message}).decode()
    return replace(image, labels={**image.labels, f"history:{path}": label})


def _recall(memory: Path, image: Image, store: ImageStore) -> Image | None:
    """The image that an earlier proof gave, unless its layer has been pruned since."""
    if not memory.is_file():
        return None
    record = json.loads(memory.read_bytes())
    if record["layer"] is None:
        return replace(image, labels={**image.labels, **record["labels"]})
    if not store.layer_path(record["layer"]).is_dir():
        return None
    with store.workspace() as workspace:
        layer = store.layer(record["layer"])
        workspace.hold([*image.layers, layer])
        return _with_layer(image, layer, store, labels=record["labels"])


def _scrub_image(image: Image, path: str, *, store: ImageStore, base: str | None, required: bool) -> Image:
    with LowerStack(image.layers) as stack, store.workspace() as workspace:
        workspace.hold(image.layers)
        copied = _copy_repository(stack, path, workspace)
        if copied is None:
            if required:
                raise ConfigError(f"there is no git repository at {path} in the image", field=image.ref)
            return replace(image, labels={**image.labels, f"history:{path}": NO_REPOSITORY})
        if base is None and is_unborn(copied.gitdir):
            return replace(image, labels={**image.labels, **_proof(path, ScrubReport("", 0, 0, 0))})
        history = read_history(copied.gitdir, base=base)
        history = replace(history, strays=tuple(sorted({*history.strays, *copied.strays})))
        if history.clean:
            report = ScrubReport(history.head, history.objects, history.objects, 0)
            return replace(image, labels={**image.labels, **_proof(path, report)})
        root = workspace.directory("scrubbed")
        _make_parents(stack, root, path)
        target = root / path.strip("/") / ".git"
        target.mkdir()
        report = rewrite_history(copied.gitdir, target, history)
        os.setxattr(target, OPAQUE, b"y")
        for borrowed in copied.borrowed:
            _delete(stack, root, borrowed)
        layer = workspace.commit(root)
        return _with_layer(image, layer, store, labels=_proof(path, report))


def _proof(path: str, report: ScrubReport) -> dict[str, str]:
    facts = {
        "head": report.head,
        "objects_before": report.objects_before,
        "objects_after": report.objects_after,
        "removed_objects": report.removed_objects,
        "removed_refs": list(report.removed_refs),
        "removed_files": list(report.removed_files),
        "rewritten": report.rewritten,
    }
    return {f"history:{path}": canonical_json(facts).decode()}


def _with_layer(image: Image, layer: Layer, store: ImageStore, *, labels: dict[str, str]) -> Image:
    """`image` with one more layer, stored under a reference of its own so that pruning leaves it alone."""
    layers = [*image.layers, layer]
    empty = store.root / "empty"
    mounts = [
        MountRecord(source=EMPTY if mount.source == empty else str(mount.source), target=mount.target)
        for mount in image.mounts
    ]
    name = digest_json([image.digest, layer.digest]).removeprefix("sha256:")[:16]
    return store.put(
        f"task:{name}",
        layers,
        env=image.env,
        workdir=image.workdir,
        user=image.user,
        mounts=mounts,
        labels={**image.labels, **labels},
    )


def _add_files(task: Task, image: Image, store: ImageStore) -> Image:
    """Loose files of `environment/`, in the working directory, as Harbor puts them there for a named image.

    They belong to the user that the agent works as, and so does the directory if the image has none there.
    """
    environment = task.environment
    assert environment.files is not None
    workdir = environment.workdir or image.workdir
    with LowerStack(image.layers) as stack, store.workspace() as workspace:
        workspace.hold(image.layers)
        owner = _owner(stack, task.agent_user or image.user)
        root = workspace.directory("files")
        _make_parents(stack, root, workdir)
        target = root / workdir.strip("/")
        if _find(stack, workdir)[0] is None:
            os.chown(target, *owner)
        for child in sorted(environment.files.iterdir()):
            if child.is_dir() and not child.is_symlink():
                shutil.copytree(child, target / child.name, symlinks=True)
            else:
                shutil.copy2(child, target / child.name, follow_symlinks=False)
        _settle(target, owner)
        return _with_layer(image, workspace.commit(root, deletions=False), store, labels={})


def _settle(target: Path, owner: tuple[int, int]) -> None:
    """One owner and plain modes: the same task gives the same layer from every checkout."""
    for folder, directories, files in os.walk(target):
        for name in (*directories, *files):
            path = Path(folder, name)
            os.chown(path, *owner, follow_symlinks=False)
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _owner(stack: LowerStack, user: str) -> tuple[int, int]:
    """(uid, gid) of `name`, `uid` or `uid:gid`, by the image's own /etc/passwd."""
    name, _, group = user.partition(":")
    if name.isdecimal() and group.isdecimal():
        return int(name), int(group)
    info, _, holder, _ = _find(stack, "/etc/passwd")
    if info is not None and stat.S_ISREG(info.st_mode):
        handle = os.open("etc/passwd", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=holder)
        with os.fdopen(handle, encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.rstrip("\n").split(":")
                if len(fields) >= 4 and name in (fields[0], fields[2]):
                    return int(fields[2]), int(fields[3])
    if name in ("root", "0"):
        return 0, 0
    if name.isdecimal():
        return int(name), int(name)
    raise ConfigError(f"there is no user {name!r} in the image", field="agent.user", remedy="name one that is there")


@dataclass(slots=True)
class _Copied:
    """A git directory taken out of an image: `borrowed` are the object directories it used from elsewhere."""

    gitdir: Path
    strays: list[str] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)


def _find(stack: LowerStack, path: str) -> tuple[os.stat_result | None, tuple[int, ...], int, str]:
    """Metadata, makers, holder and normal path of an absolute path. A link on the way is never followed."""
    within = stack.whole()
    parts = PurePosixPath(os.path.normpath("/" + path.strip("/"))).parts[1:]
    info: os.stat_result | None = None
    holder = -1
    for number in range(1, len(parts) + 1):
        info, makers, holder = stack.lookup(within, "/".join(parts[:number]))
        if info is None:
            return None, (), -1, "/" + "/".join(parts)
        if stat.S_ISLNK(info.st_mode):
            raise ConfigError(f"{'/' + '/'.join(parts[:number])} is a link", field=path, remedy="name the real place")
        within = makers
    return info, within, holder, "/" + "/".join(parts)


def _copy_repository(stack: LowerStack, path: str, workspace: Workspace) -> _Copied | None:
    info, makers, _, where = _find(stack, path)
    if info is None or not stat.S_ISDIR(info.st_mode):
        return None
    inside = f"{where.strip('/')}/.git"
    info, makers, _ = stack.lookup(makers, inside)
    if info is None:
        return None
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError("is a linked worktree or a submodule: its objects are elsewhere", field=f"{where}/.git")
    parent = workspace.directory("repository")
    copied = _Copied(parent / ".git")
    copied.gitdir.mkdir()
    _copy_tree(stack, makers, inside, copied.gitdir, copied, "")
    os.chown(copied.gitdir, info.st_uid, info.st_gid)
    copied.gitdir.chmod(stat.S_IMODE(info.st_mode))
    _borrow(stack, f"/{inside}/objects", copied)
    return copied


def _copy_tree(
    stack: LowerStack, makers: tuple[int, ...], path: str, target: Path, copied: _Copied, relative: str
) -> None:
    """Copy files and directories; anything else is noted as a stray and left behind."""
    for name in stack.names(makers, path):
        inner = f"{path}/{name}"
        shown = f"{relative}{name}"
        info, below, holder = stack.lookup(makers, inner)
        if info is None:
            continue
        if stat.S_ISDIR(info.st_mode):
            (target / name).mkdir(exist_ok=True)
            _copy_tree(stack, below, inner, target / name, copied, f"{shown}/")
        elif stat.S_ISREG(info.st_mode):
            handle = os.open(inner, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=holder)
            with os.fdopen(handle, "rb") as source, (target / name).open("wb") as sink:
                shutil.copyfileobj(source, sink)
        else:
            copied.strays.append(shown)


def _borrow(stack: LowerStack, objects: str, copied: _Copied) -> None:
    """Bring in what `objects/info/alternates` names, so that it is enumerated too, and remember it for deletion."""
    queue = [(objects, copied.gitdir / "objects")]
    while queue:
        place, local = queue.pop()
        listing = local / "info" / "alternates"
        if not listing.is_file():
            continue
        if local == copied.gitdir / "objects":
            copied.strays.append("objects/info/alternates")
        for line in listing.read_text("utf-8", "surrogateescape").splitlines():
            if not line or line.startswith("#"):
                continue
            info, makers, _, where = _find(stack, os.path.normpath(os.path.join(place, line)))
            if info is None or where in copied.borrowed:
                continue
            if len(copied.borrowed) >= _MAX_ALTERNATES:
                raise ConfigError("borrows objects from too many places", field=objects)
            copied.borrowed.append(where)
            scratch = copied.gitdir.parent / f"borrowed-{len(copied.borrowed)}"
            scratch.mkdir()
            _copy_tree(stack, makers, where.strip("/"), scratch, copied, f"{where}/")
            queue.append((where, scratch))
            shutil.copytree(
                scratch, copied.gitdir / "objects", dirs_exist_ok=True, ignore=shutil.ignore_patterns("info")
            )
        listing.unlink()


def _make_parents(stack: LowerStack, root: Path, path: str) -> None:
    """Directories down to `path` in a new layer, with the owner and mode that the image gives them."""
    parts = PurePosixPath(path).parts[1:]
    for number in range(1, len(parts) + 1):
        target = root.joinpath(*parts[:number])
        if target.is_dir():
            continue
        target.mkdir()
        info, *_ = _find(stack, "/".join(parts[:number]))
        if info is not None:
            os.chown(target, info.st_uid, info.st_gid)
            target.chmod(stat.S_IMODE(info.st_mode))


def _delete(stack: LowerStack, root: Path, path: str) -> None:
    """A whiteout (character device 0:0) over `path`."""
    parent, _, name = path.rpartition("/")
    _make_parents(stack, root, parent or "/")
    place = root / parent.strip("/") / name
    if not os.path.lexists(place):
        os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(0, 0))
