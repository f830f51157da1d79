"""Scrubbing a repository's history: nothing that is not an ancestor of the base commit may remain.

A repository in an image often holds more than its working tree shows: later commits, tags, other branches,
reflogs, a stash, packs without an index, objects borrowed from elsewhere. Any of them can hold the answer.
The proof here enumerates every object in the object database, not every reference.

A repository is data: its configuration and hooks are never used. Each question is asked through a fresh
repository of ours that borrows the objects (gitrepository-layout(5), `objects/info/alternates`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.common import ConfigError, InfraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_OID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_LOOSE = re.compile(r"objects/[0-9a-f]{2}/[0-9a-f]{38}(?:[0-9a-f]{24})?")
_PACK = re.compile(r"objects/pack/(pack-[0-9a-f]+)\.(pack|idx|rev|bitmap|mtimes|keep)")
_PLAIN_FILES = re.compile(
    r"HEAD|config|description|index|packed-refs|shallow|info/(?:exclude|attributes|refs)"
    r"|objects/info/packs|hooks/.*\.sample|refs/(?:heads|tags)/.+|logs/(?:HEAD|refs/heads/.+)"
)
_KEPT_REFS = ("refs/heads/", "refs/tags/")
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class History:
    """What a repository holds, and what of it belongs to the base commit's past.

    `foreign` are the objects that do not, `strays` the files that may hold or name some (relative to the git
    directory), `foreign_refs` the references that do not point into the past.
    """

    head: str
    branch: str | None
    refs: dict[str, str]
    allowed: frozenset[str]
    objects: int
    foreign: frozenset[str] = frozenset()
    foreign_refs: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    object_format: str = "sha1"
    shallow: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing but the base commit's past is there."""
        return not (self.foreign or self.foreign_refs or self.strays)


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """The proof that goes into a record: counts before and after, and what was taken out."""

    head: str
    objects_before: int
    objects_after: int
    removed_objects: int
    removed_refs: tuple[str, ...] = ()
    removed_files: tuple[str, ...] = ()
    rewritten: bool = False


@dataclass(slots=True)
class _Git:
    """A fresh repository that borrows other object directories."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, stdin: bytes | None = None, cwd: Path | None = None) -> bytes:
        command = ["git", f"--git-dir={self.directory}", "-c", "core.hooksPath=/dev/null", *arguments]
        try:
            done = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                env=self.environment,
                cwd=cwd or self.directory,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise InfraError("git is not installed on this machine", remedy="apt-get install git") from error
        except subprocess.TimeoutExpired as error:
            raise InfraError(f"git {arguments[0]} took longer than {_TIMEOUT_S:.0f} s") from error
        if done.returncode != 0:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise ConfigError(f"git {arguments[0]} failed: {last[-1] if last else done.returncode}")
        return done.stdout

    def lines(self, *arguments: str, stdin: bytes | None = None) -> list[str]:
        return self.run(*arguments, stdin=stdin).decode("utf-8", "surrogateescape").splitlines()


def _environment(home: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": str(home),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }


@contextmanager
def _borrowing(gitdir: Path, object_format: str, shallow: Sequence[str]) -> Iterator[_Git]:
    with tempfile.TemporaryDirectory(prefix="proctor-git-") as name:
        home = Path(name)
        git = _Git(home / "fresh.git", _environment(home))
        git.run(
            "init", "--quiet", "--bare", "--template=", f"--object-format={object_format}", str(git.directory), cwd=home
        )
        (git.directory / "objects" / "info").mkdir(exist_ok=True)
        (git.directory / "objects" / "info" / "alternates").write_text(f"{(gitdir / 'objects').resolve()}\n")
        if shallow:
            (git.directory / "shallow").write_text("".join(f"{one}\n" for one in shallow))
        yield git


def git_directory(worktree: Path) -> Path:
    """The `.git` directory of a working tree, or the directory itself when it is bare.

    Raises ConfigError for a linked worktree or submodule, whose objects are elsewhere.
    """
    dot = worktree / ".git"
    if dot.is_symlink() or dot.is_file():
        raise ConfigError("is a linked worktree or a submodule: its objects are elsewhere", field=str(worktree))
    if dot.is_dir():
        return dot
    if (worktree / "objects").is_dir() and (worktree / "HEAD").is_file():
        return worktree
    raise ConfigError("is not a git repository", field=str(worktree))


def read_history(gitdir: Path, *, base: str | None = None) -> History:
    """Enumerate every object of a repository and say which belong to the past of its base commit.

    The base is HEAD; when `base` is given, HEAD must be that commit. Tags and branches of the past stay: version
    tools need them. Raises ConfigError when the repository cannot be judged (no commit, unknown reference
    storage, missing objects): what cannot be proved clean is not used.
    """
    object_format = _check_storage(gitdir)
    branch, head = _head(gitdir)
    if base is not None and not head.startswith(base):
        raise ConfigError(f"HEAD is {head}, not the base commit {base}", field=str(gitdir))
    shallow = tuple(one for one in _text(gitdir / "shallow").split() if _OID.fullmatch(one))
    references = _references(gitdir)
    with _borrowing(gitdir, object_format, shallow) as git:
        present = set(git.lines("cat-file", "--batch-all-objects", "--unordered", "--batch-check=%(objectname)"))
        past = {line.split(" ", 1)[0] for line in git.lines("rev-list", "--objects", head)}
        commits = set(git.lines("rev-list", head))
        kept: dict[str, str] = {}
        allowed = set(past)
        for name, oid in references.items():
            chain = _tag_chain(git, oid, present) if name.startswith(_KEPT_REFS) else []
            if chain and chain[-1] in commits:
                kept[name] = oid
                allowed.update(chain)
    if missing := past - present:
        raise ConfigError(f"{len(missing)} objects of the base commit are missing", field=str(gitdir))
    return History(
        head=head,
        branch=branch,
        refs=kept,
        allowed=frozenset(allowed),
        objects=len(present),
        foreign=frozenset(present - allowed),
        foreign_refs=tuple(sorted(set(references) - set(kept))),
        strays=tuple(sorted(_strays(gitdir, allowed))),
        object_format=object_format,
        shallow=tuple(one for one in shallow if one in commits),
    )


def is_unborn(gitdir: Path) -> bool:
    """Whether a repository was only just made: no commit, no reference and not one file in its object database."""
    text = _text(gitdir / "HEAD").strip()
    files = (path for path in (gitdir / "objects").rglob("*") if path.is_symlink() or not path.is_dir())
    return text.startswith("ref: refs/heads/") and not _references(gitdir) and next(files, None) is None


def scrub_history(worktree: Path, *, base: str | None = None) -> ScrubReport:
    """Leave only the base commit's past in the repository of `worktree`, rewriting it when there is more.

    The new git directory is built beside the old one from the objects of the past alone, checked by the same
    enumeration, and then put in its place. The working tree is not touched; the index becomes the base commit's.
    """
    gitdir = git_directory(worktree)
    history = read_history(gitdir, base=base)
    if history.clean:
        return ScrubReport(history.head, history.objects, history.objects, 0)
    draft = Path(tempfile.mkdtemp(dir=gitdir.parent, prefix=".scrubbed-"))
    try:
        report = rewrite_history(gitdir, draft, history)
        doomed = Path(tempfile.mkdtemp(dir=gitdir.parent, prefix=".doomed-"))
        os.rename(gitdir, doomed)
        os.rename(draft, gitdir)
        shutil.rmtree(doomed)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return report


def rewrite_history(gitdir: Path, target: Path, history: History) -> ScrubReport:
    """Write the scrubbed git directory to the empty directory `target`, and prove it clean."""
    owner = gitdir.stat()
    bare = gitdir.name != ".git"
    with _borrowing(gitdir, history.object_format, history.shallow) as git:
        pack = git.run(
            "pack-objects", "--stdout", "-q", stdin="".join(f"{o}\n" for o in sorted(history.allowed)).encode()
        )
    with tempfile.TemporaryDirectory(prefix="proctor-git-") as home:
        new = _Git(target, _environment(Path(home)))
        new.run("init", "--quiet", "--bare", "--template=", f"--object-format={history.object_format}", str(target))
        if history.shallow:
            (target / "shallow").write_text("".join(f"{one}\n" for one in history.shallow))
        # index-pack computes every name from content, so nothing can hide under an allowed name.
        new.run("index-pack", "--stdin", "--strict", stdin=pack)
        refs = "".join(f"create {name} {oid}\n" for name, oid in history.refs.items())
        new.run("update-ref", "--no-deref", "--stdin", stdin=refs.encode("utf-8", "surrogateescape"))
        head = f"ref: {history.branch}\n" if history.branch else f"{history.head}\n"
        (target / "HEAD").write_text(head)
        if not bare:
            new.run("config", "core.bare", "false")
            new.run("config", "core.logallrefupdates", "true")
            new.run("read-tree", history.head)
        exclude = _text(gitdir / "info" / "exclude")
        if exclude:
            (target / "info").mkdir(exist_ok=True)
            (target / "info" / "exclude").write_bytes(exclude.encode("utf-8", "surrogateescape"))
    _settle(target, owner)
    after = read_history(target)
    if not after.clean or after.head != history.head or after.allowed != history.allowed:
        raise InfraError("a scrubbed repository is not clean; it is not used", field=str(gitdir))
    return ScrubReport(
        head=history.head,
        objects_before=history.objects,
        objects_after=after.objects,
        removed_objects=len(history.foreign),
        removed_refs=history.foreign_refs,
        removed_files=history.strays,
        rewritten=True,
    )


def _settle(target: Path, owner: os.stat_result) -> None:
    """Give the new directory the old one's owner and permissions: git refuses a repository of somebody else."""
    for folder, directories, files in os.walk(target):
        for name in (".", *directories, *files):
            os.chown(os.path.join(folder, name), owner.st_uid, owner.st_gid, follow_symlinks=False)
    target.chmod(owner.st_mode & 0o777)


def _check_storage(gitdir: Path) -> str:
    """The object format, after refusing what the enumeration would not see."""
    config = _text(gitdir / "config").lower()
    if (gitdir / "reftable").exists() or re.search(r"^\s*refstorage\s*=\s*(?!files)", config, re.MULTILINE):
        raise ConfigError("keeps references in a form that is not known here", field=str(gitdir))
    if (gitdir / "commondir").exists():
        raise ConfigError("is a linked worktree: its objects are elsewhere", field=str(gitdir))
    return "sha256" if re.search(r"^\s*objectformat\s*=\s*sha256", config, re.MULTILINE) else "sha1"


def _head(gitdir: Path) -> tuple[str | None, str]:
    """(branch reference or None when detached, commit) of HEAD."""
    text = _text(gitdir / "HEAD").strip()
    if _OID.fullmatch(text):
        return None, text
    name = text.removeprefix("ref:").strip()
    oid = _references(gitdir).get(name)
    if not text.startswith("ref:") or not name.startswith("refs/heads/") or oid is None:
        raise ConfigError("has no commit at HEAD", field=str(gitdir))
    return name, oid


def _references(gitdir: Path) -> dict[str, str]:
    """Every reference, loose ones over packed ones (symbolic ones, as in remotes, count by their text)."""
    found: dict[str, str] = {}
    for line in _text(gitdir / "packed-refs").splitlines():
        oid, _, name = line.partition(" ")
        if _OID.fullmatch(oid) and name.startswith("refs/"):
            found[name] = oid
    for folder, directories, files in os.walk(gitdir / "refs"):
        directories[:] = [name for name in directories if not os.path.islink(os.path.join(folder, name))]
        for file in files:
            path = Path(folder, file)
            found[os.path.relpath(path, gitdir)] = _text(path).strip()
    return found


def _tag_chain(git: _Git, oid: str, present: set[str]) -> list[str]:
    """An annotated tag and what it points at, down to the commit."""
    chain = [oid]
    while len(chain) < 16 and chain[-1] in present:
        kind, *rest = git.lines("cat-file", "-t", chain[-1])[:1]
        if kind != "tag" or rest:
            return chain
        target = git.lines("cat-file", "-p", chain[-1])[0].removeprefix("object ")
        chain.append(target)
    return []


def _strays(gitdir: Path, allowed: set[str]) -> Iterator[str]:
    """Files that are no part of a plain repository, or that name objects outside the past."""
    packs: dict[str, set[str]] = {}
    for folder, directories, files in os.walk(gitdir):
        for name in (*directories, *files):
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, gitdir)
            if os.path.islink(path):
                yield relative
            elif name in files:
                if found := _PACK.fullmatch(relative):
                    packs.setdefault(found.group(1), set()).add(found.group(2))
                elif relative.startswith("logs/") and _PLAIN_FILES.fullmatch(relative):
                    named = {word for line in _text(Path(path)).splitlines() for word in line.split()[:2]}
                    if {one for one in named if one.strip("0")} - allowed:
                        yield relative
                elif relative == "objects/info/commit-graph":
                    if not graph_commits(Path(path).read_bytes()) <= allowed:
                        yield relative
                elif not _LOOSE.fullmatch(relative) and not _PLAIN_FILES.fullmatch(relative):
                    yield relative
    for name, suffixes in packs.items():
        if not {"pack", "idx"} <= suffixes:
            yield f"objects/pack/{name}.pack"


def graph_commits(data: bytes) -> set[str]:
    """Commits that a commit-graph file names (gitformat-commit-graph(5)); `{"?"}` when it cannot be read."""
    unknown = {"?"}
    if len(data) < 8 or data[:4] != b"CGPH" or data[4] != 1 or data[5] not in (1, 2) or data[7] != 0:
        return unknown
    size = 20 if data[5] == 1 else 32
    table = [data[8 + 12 * row : 20 + 12 * row] for row in range(data[6] + 1)]
    if any(len(row) < 12 for row in table):
        return unknown
    offsets = [int.from_bytes(row[4:], "big") for row in table]
    for row, start, end in zip(table, offsets, offsets[1:], strict=False):
        if row[:4] == b"OIDL" and start <= end <= len(data):
            return {data[at : at + size].hex() for at in range(start, end, size)}
    return unknown


def _text(path: Path) -> str:
    """A small file of a git directory; a link is never followed, a missing file is empty."""
    if path.is_symlink() or not path.is_file():
        return ""
    return path.read_bytes().decode("utf-8", "surrogateescape")
