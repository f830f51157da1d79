"""Scrubbing git history: every hiding place that we know of is planted in a real repository, and emptied."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from proctor.common import ConfigError
from proctor.tasks.history import git_directory, graph_commits, read_history, scrub_history

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

SECRET = "the answer is 42\n"


def git(repo: Path, *arguments: str, stdin: str | None = None) -> str:
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@example.org",
        "GIT_AUTHOR_DATE": "2020-01-01T00:00:00Z",
        "GIT_COMMITTER_DATE": "2020-01-01T00:00:00Z",
    }
    done = subprocess.run(
        ["git", "-C", str(repo), *arguments], input=stdin, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Two commits, the first tagged v1 (annotated) and v1-light; HEAD is the second."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number in (1, 2):
        (folder / "code.py").write_text(f"version = {number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"commit {number}")
        if number == 1:
            git(folder, "tag", "-a", "v1", "-m", "first")
            git(folder, "tag", "v1-light")
    shutil.rmtree(folder / ".git" / "logs")
    (folder / ".git" / "COMMIT_EDITMSG").unlink()
    return folder


def future_commit(repo: Path) -> str:
    """A commit after HEAD that holds the answer; no reference keeps it."""
    head = git(repo, "rev-parse", "HEAD")
    blob = git(repo, "hash-object", "-w", "--stdin", stdin=SECRET)
    tree = git(repo, "mktree", stdin=f"100644 blob {blob}\tanswer.py\n")
    return git(repo, "commit-tree", tree, "-p", head, "-m", "the fix")


def plant_dangling(repo: Path) -> None:
    future_commit(repo)


def plant_tag(repo: Path) -> None:
    git(repo, "tag", "v2", future_commit(repo))


def plant_annotated_tag(repo: Path) -> None:
    git(repo, "tag", "-a", "v2", "-m", SECRET, future_commit(repo))


def plant_branch(repo: Path) -> None:
    git(repo, "branch", "next", future_commit(repo))


def plant_packed_refs(repo: Path) -> None:
    git(repo, "branch", "next", future_commit(repo))
    git(repo, "pack-refs", "--all")


def plant_pack(repo: Path) -> None:
    git(repo, "branch", "next", future_commit(repo))
    git(repo, "gc", "-q")
    git(repo, "branch", "-D", "next")


def plant_pack_without_index(repo: Path) -> None:
    plant_pack(repo)
    for index in (repo / ".git/objects/pack").glob("*.idx"):
        hidden = index.with_suffix(".pack").rename(index.with_name("pack-" + "f" * 40 + ".pack"))
        assert hidden.is_file()
        index.unlink()
    for number in (1, 2):  # the past is loose again, so HEAD can be read
        blob = git(repo, "hash-object", "-w", "--stdin", stdin=f"version = {number}\n")
        tree = git(repo, "mktree", stdin=f"100644 blob {blob}\tcode.py\n")
        parent = ["-p", commit] if number == 2 else []  # noqa: F821
        commit = git(repo, "commit-tree", tree, *parent, "-m", f"commit {number}")
    git(repo, "update-ref", "refs/heads/main", commit)
    git(repo, "tag", "-d", "v1")


def plant_reflog(repo: Path) -> None:
    commit, head = future_commit(repo), git(repo, "rev-parse", "HEAD")
    git(repo, "update-ref", "--create-reflog", "refs/heads/main", commit)
    git(repo, "update-ref", "refs/heads/main", head)


def plant_stash(repo: Path) -> None:
    (repo / "code.py").write_text(SECRET)
    git(repo, "stash", "-q")


def plant_notes(repo: Path) -> None:
    git(repo, "notes", "add", "-m", SECRET, "HEAD")


def plant_remote(repo: Path) -> None:
    git(repo, "update-ref", "refs/remotes/origin/main", future_commit(repo))


def plant_fetch_head(repo: Path) -> None:
    (repo / ".git/FETCH_HEAD").write_text(f"{future_commit(repo)}\t\tbranch 'main' of example.org\n")


def plant_replacement(repo: Path) -> None:
    git(repo, "replace", git(repo, "rev-parse", "HEAD"), future_commit(repo))


def plant_worktree(repo: Path) -> None:
    git(repo, "worktree", "add", "-q", "--detach", str(repo.parent / "other"), future_commit(repo))


def plant_staged(repo: Path) -> None:
    (repo / "code.py").write_text(SECRET)
    git(repo, "add", "code.py")
    (repo / "code.py").write_text("version = 2\n")


def plant_temporary_file(repo: Path) -> None:
    (repo / ".git/objects/pack/tmp_pack_x").write_text(SECRET)


def plant_original_head(repo: Path) -> None:
    (repo / ".git/ORIG_HEAD").write_text(future_commit(repo))


def plant_commit_message(repo: Path) -> None:
    (repo / ".git/COMMIT_EDITMSG").write_text(SECRET)


def plant_alternate(repo: Path) -> None:
    other = repo.parent / "mirror"
    shutil.copytree(repo, other)
    future_commit(other)
    (repo / ".git/objects/info").mkdir(exist_ok=True)
    (repo / ".git/objects/info/alternates").write_text(f"{other / '.git/objects'}\n")


def plant_commit_graph(repo: Path) -> None:
    git(repo, "branch", "next", future_commit(repo))
    git(repo, "commit-graph", "write", "--reachable")
    git(repo, "branch", "-D", "next")
    shutil.rmtree(repo / ".git/logs", ignore_errors=True)
    past = ancestry(repo)
    for loose in (repo / ".git/objects").glob("??/*"):
        if loose.parent.name + loose.name not in past:
            loose.unlink()


def plant_linked_file(repo: Path) -> None:
    (repo.parent / "elsewhere").write_text(SECRET)
    (repo / ".git/notes.txt").symlink_to(repo.parent / "elsewhere")


PLANTS = [value for name, value in sorted(globals().items()) if name.startswith("plant_")]


def readable_objects(repo: Path) -> set[str]:
    out = git(repo, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    return set(out.splitlines())


def ancestry(repo: Path) -> set[str]:
    lines = git(repo, "rev-list", "--objects", "HEAD", "--tags").splitlines()
    tags = git(repo, "for-each-ref", "--format=%(objectname)", "refs/tags").splitlines()
    return {line.split(" ")[0] for line in lines} | set(tags)


def holds_secret(repo: Path) -> bool:
    for path in (repo / ".git").rglob("*"):
        if path.is_file() and SECRET.strip().encode() in path.read_bytes():
            return True
    return any(SECRET.strip() in git(repo, "cat-file", "-p", oid) for oid in readable_objects(repo))


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.removeprefix("plant_"))
def test_what_is_not_of_the_past_is_found_and_removed(repo: Path, plant: Callable[[Path], None]) -> None:
    plant(repo)
    assert not read_history(repo / ".git").clean
    head = git(repo, "rev-parse", "HEAD")
    files = {path.name: path.read_bytes() for path in repo.iterdir() if path.is_file()}

    report = scrub_history(repo)

    assert report.rewritten
    assert report.head == head == git(repo, "rev-parse", "HEAD")
    assert read_history(repo / ".git").clean
    assert readable_objects(repo) == ancestry(repo)
    assert not holds_secret(repo)
    assert files == {path.name: path.read_bytes() for path in repo.iterdir() if path.is_file()}
    assert git(repo, "fsck", "--full", "--strict") == ""


def test_a_clean_repository_is_left_as_it_is(repo: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (repo / ".git").rglob("*") if path.is_file()}
    report = scrub_history(repo)
    assert not report.rewritten
    assert report.removed_objects == 0
    assert before == {path: path.stat().st_mtime_ns for path in (repo / ".git").rglob("*") if path.is_file()}


def test_a_commit_graph_of_the_past_is_left_as_it_is(repo: Path) -> None:
    git(repo, "commit-graph", "write", "--reachable")
    assert graph_commits((repo / ".git/objects/info/commit-graph").read_bytes()) == set(
        git(repo, "rev-list", "--all").split()
    )
    assert not scrub_history(repo).rewritten


@pytest.mark.parametrize("data", [b"", b"CGPH", b"CGPH\x01\x01\x05\x00", b"CGPH\x01\x01\x00\x00" + b"\0" * 12])
def test_a_commit_graph_that_cannot_be_read_is_not_trusted(data: bytes) -> None:
    assert graph_commits(data) == {"?"}


def test_tags_and_branch_of_the_past_survive(repo: Path) -> None:
    plant_tag(repo)
    scrub_history(repo)
    assert git(repo, "tag").split() == ["v1", "v1-light"]
    assert git(repo, "describe") == "v1-1-g" + git(repo, "rev-parse", "--short", "HEAD")
    assert git(repo, "symbolic-ref", "HEAD") == "refs/heads/main"
    assert git(repo, "status", "--porcelain") == ""


def test_a_detached_head_stays_detached_and_later_commits_go(repo: Path) -> None:
    git(repo, "checkout", "-q", "v1")
    report = scrub_history(repo)
    assert report.removed_refs == ("refs/heads/main",)
    assert git(repo, "log", "--oneline", "--all").count("\n") == 0
    assert git(repo, "rev-parse", "HEAD") == git(repo, "rev-parse", "v1^{commit}")


def test_head_must_be_the_stated_base(repo: Path) -> None:
    old = git(repo, "rev-parse", "HEAD~1")
    with pytest.raises(ConfigError, match=f"not the base commit {old}"):
        scrub_history(repo, base=old)
    assert scrub_history(repo, base=git(repo, "rev-parse", "HEAD")).removed_objects == 0


def test_hooks_and_configuration_are_never_run(repo: Path, tmp_path: Path) -> None:
    plant_tag(repo)
    mark = tmp_path / "was-run"
    git(repo, "config", "core.fsmonitor", f"touch {mark}; false")
    hook = repo / ".git/hooks/reference-transaction"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    scrub_history(repo)
    assert not mark.exists()
    assert not (repo / ".git/hooks/reference-transaction").exists()


def test_a_sha256_repository(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main", "--object-format=sha256")
    (folder / "code.py").write_text("x\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    future_commit(folder)
    assert scrub_history(folder).removed_objects == 3
    assert readable_objects(folder) == ancestry(folder)


def test_a_shallow_clone_stays_shallow(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", "shallow")
    shallow = tmp_path / "shallow"
    report = scrub_history(shallow)
    assert report.rewritten
    assert git(shallow, "log", "--oneline").count("\n") == 0
    assert git(shallow, "remote") == ""


def test_what_cannot_be_judged_is_refused(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a git repository"):
        git_directory(tmp_path)
    git(tmp_path, "init", "-q", "empty")
    with pytest.raises(ConfigError, match="no commit at HEAD"):
        scrub_history(tmp_path / "empty")
    linked = tmp_path / "linked"
    git(repo, "worktree", "add", "-q", str(linked))
    with pytest.raises(ConfigError, match="linked worktree"):
        scrub_history(linked)
    for loose in (repo / ".git/objects").glob("??/*"):
        loose.unlink()
    with pytest.raises(ConfigError):
        scrub_history(repo)
