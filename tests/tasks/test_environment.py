"""Images for tasks: loose files, and history scrubbed inside a stack of layers, wherever it hides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from proctor.common import ConfigError
from proctor.sandbox.images.store import ImageStore
from proctor.sandbox.layers import LowerStack
from proctor.tasks.environment import NO_REPOSITORY, prepare, scrub_image
from proctor.tasks.model import Carry, Environment, Task, Verifier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proctor.sandbox.contract import Image

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.sandbox,
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed"),
]


def git(folder: Path, *arguments: str, stdin: str | None = None) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "a", f"GIT_{role}_EMAIL": "a@example.org"}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, input=stdin, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make_repository(folder: Path) -> None:
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "--template=", "-b", "main")
    (folder / "code.py").write_text("x = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "base")
    shutil.rmtree(folder / ".git/logs")
    (folder / ".git/COMMIT_EDITMSG").unlink()


def add_future(folder: Path) -> str:
    blob = git(folder, "hash-object", "-w", "--stdin", stdin="the answer\n")
    tree = git(folder, "mktree", stdin=f"100644 blob {blob}\tanswer\n")
    return git(folder, "commit-tree", tree, "-p", "HEAD", "-m", "fix")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def image_of(store: ImageStore, *builders: Callable[[Path], None]) -> Image:
    """An image with one layer for each function that fills a root directory."""
    with store.workspace() as workspace:
        layers = []
        for build in builders:
            root = workspace.directory("layer")
            build(root)
            layers.append(workspace.commit(root))
        return store.put("test:image", layers, workdir="/testbed", env={"A": "1"})


def merged(image: Image, path: str, target: Path) -> Path:
    """Copy a directory of the image out, as overlayfs would show it."""

    def copy(stack: LowerStack, makers: tuple[int, ...], inner: str, place: Path) -> None:
        place.mkdir(parents=True)
        for name in stack.names(makers, inner):
            info, below, holder = stack.lookup(makers, f"{inner}/{name}")
            assert info is not None
            if below:
                copy(stack, below, f"{inner}/{name}", place / name)
            elif os.path.islink(f"/proc/self/fd/{holder}/{inner}/{name}"):
                (place / name).symlink_to("nowhere")
            else:
                shutil.copy(f"/proc/self/fd/{holder}/{inner}/{name}", place / name)

    with LowerStack(image.layers) as stack:
        makers = stack.whole()
        for number in range(1, path.count("/") + 1):
            info, makers, _ = stack.lookup(makers, "/".join(path.strip("/").split("/")[:number]))
            assert info is not None, path
        copy(stack, makers, path.strip("/"), target)
    return target


def exists(image: Image, path: str) -> bool:
    with LowerStack(image.layers) as stack:
        makers = stack.whole()
        parts = path.strip("/").split("/")
        for number in range(1, len(parts) + 1):
            info, makers, _ = stack.lookup(makers, "/".join(parts[:number]))
            if info is None:
                return False
        return True


def objects(repo: Path) -> set[str]:
    return set(git(repo, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").splitlines())


def past(repo: Path) -> set[str]:
    return {line.split(" ")[0] for line in git(repo, "rev-list", "--objects", "HEAD").splitlines()}


def task_for(tmp_path: Path, **changes: object) -> Task:
    task = Task(
        name="t",
        path=tmp_path,
        digest="sha256:0",
        instruction="",
        environment=Environment(image="test:image"),
        verifier=Verifier(kind="reward"),
        carry=Carry("patch", repo="/testbed"),
        solution=None,
        history="scrub",
    )
    return replace(task, **changes)  # type: ignore[arg-type]


async def test_a_clean_repository_adds_no_layer_and_leaves_a_proof(store: ImageStore, tmp_path: Path) -> None:
    image = image_of(store, lambda root: make_repository(root / "testbed"))
    prepared = await prepare(task_for(tmp_path), store=store)
    assert prepared.layers == image.layers
    assert prepared.digest == image.digest
    proof = json.loads(prepared.labels["history:/testbed"])
    assert proof["removed_objects"] == 0
    assert proof["objects_after"] == 3
    assert not proof["rewritten"]


def test_later_commits_go_whichever_layer_holds_them(store: ImageStore, tmp_path: Path) -> None:
    work = tmp_path / "work"
    make_repository(work)

    def lower(root: Path) -> None:
        shutil.copytree(work, root / "testbed")

    def upper(root: Path) -> None:
        before = {path for path in work.rglob("*") if path.is_file()}
        git(work, "tag", "fixed", add_future(work))
        for path in set(work.rglob("*")) - before:
            if path.is_file():
                place = root / "testbed" / path.relative_to(work)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)

    image = image_of(store, lower, upper)
    scrubbed = scrub_image(image, "/testbed", store=store)
    assert len(scrubbed.layers) == 3
    assert scrubbed.env == {"A": "1"}
    assert store.find_digest(scrubbed.ref) == scrubbed.digest
    repo = merged(scrubbed, "/testbed", tmp_path / "out")
    assert objects(repo) == past(repo)
    assert git(repo, "tag") == ""
    assert git(repo, "status", "--porcelain") == ""
    proof = json.loads(scrubbed.labels["history:/testbed"])
    assert proof["removed_objects"] == 3
    assert proof["removed_refs"] == ["refs/tags/fixed"]
    assert scrub_image(scrubbed, "/testbed", store=store).layers == scrubbed.layers


def test_borrowed_objects_are_deleted_where_they_are(store: ImageStore, tmp_path: Path) -> None:
    def build(root: Path) -> None:
        make_repository(root / "testbed")
        shutil.copytree(root / "testbed/.git", root / "opt/mirror.git")
        git(root / "opt/mirror.git", "tag", "fixed", add_future(root / "opt/mirror.git"))
        (root / "testbed/.git/objects/info").mkdir(exist_ok=True)
        (root / "testbed/.git/objects/info/alternates").write_text("/opt/mirror.git/objects\n")

    image = image_of(store, build)
    scrubbed = scrub_image(image, "/testbed", store=store)
    assert not exists(scrubbed, "/opt/mirror.git/objects")
    assert exists(scrubbed, "/opt/mirror.git/HEAD")
    repo = merged(scrubbed, "/testbed", tmp_path / "out")
    assert objects(repo) == past(repo)


def test_owner_and_mode_are_those_of_the_image(store: ImageStore, tmp_path: Path) -> None:
    def build(root: Path) -> None:
        make_repository(root / "testbed")
        add_future(root / "testbed")
        for path in [root / "testbed", *(root / "testbed").rglob("*")]:
            os.chown(path, 1000, 1000)
        (root / "testbed").chmod(0o750)

    scrubbed = scrub_image(image_of(store, build), "/testbed", store=store)
    top = scrubbed.layers[-1].path / "testbed"
    assert (top.stat().st_uid, top.stat().st_mode & 0o777) == (1000, 0o750)
    assert {path.stat().st_uid for path in (top / ".git").rglob("*")} == {1000}


def test_a_link_in_the_git_directory_is_dropped(store: ImageStore, tmp_path: Path) -> None:
    def build(root: Path) -> None:
        make_repository(root / "testbed")
        (root / "testbed/.git/secrets").symlink_to("/etc/shadow")

    scrubbed = scrub_image(image_of(store, build), "/testbed", store=store)
    assert json.loads(scrubbed.labels["history:/testbed"])["removed_files"] == ["secrets"]
    assert not exists(scrubbed, "/testbed/.git/secrets")


async def test_a_plain_directory_has_no_history(store: ImageStore, tmp_path: Path) -> None:
    image = image_of(store, lambda root: (root / "testbed").mkdir())
    prepared = await prepare(task_for(tmp_path), store=store)
    assert prepared.digest == image.digest
    assert prepared.labels["history:/testbed"] == NO_REPOSITORY
    with pytest.raises(ConfigError, match="no git repository at /testbed"):
        await prepare(task_for(tmp_path, base_commit="1" * 40), store=store)


async def test_the_directory_the_agent_starts_in_is_scrubbed_too(store: ImageStore, tmp_path: Path) -> None:
    def build(root: Path) -> None:
        make_repository(root / "testbed")
        add_future(root / "testbed")

    image_of(store, build)
    prepared = await prepare(task_for(tmp_path, carry=Carry("filesystem")), store=store)
    assert json.loads(prepared.labels["history:/testbed"])["removed_objects"] == 3


async def test_a_history_that_the_task_keeps_is_counted_and_not_changed(store: ImageStore, tmp_path: Path) -> None:
    def build(root: Path) -> None:
        make_repository(root / "testbed")
        git(root / "testbed", "tag", "lost", add_future(root / "testbed"))

    image = image_of(store, build)
    prepared = await prepare(task_for(tmp_path, carry=Carry("filesystem"), history="keep"), store=store)
    assert prepared.layers == image.layers
    assert json.loads(prepared.labels["history:/testbed"]) == {
        "kept": True,
        "head": json.loads(prepared.labels["history:/testbed"])["head"],
        "objects": 6,
        "foreign_objects": 3,
        "foreign_refs": ["refs/tags/lost"],
    }


async def test_a_kept_history_that_cannot_be_judged_is_named(store: ImageStore, tmp_path: Path) -> None:
    def build(root: Path) -> None:
        (root / "testbed").mkdir()
        (root / "testbed/.git").write_text("gitdir: ../elsewhere\n")

    image_of(store, build)
    prepared = await prepare(task_for(tmp_path, carry=Carry("filesystem"), history="keep"), store=store)
    assert "linked worktree" in json.loads(prepared.labels["history:/testbed"])["not_judged"]


def test_a_repository_without_a_commit_has_no_history(store: ImageStore, tmp_path: Path) -> None:
    def fresh(root: Path) -> None:
        (root / "testbed").mkdir()
        git(root / "testbed", "init", "-q", "--template=")

    scrubbed = scrub_image(image_of(store, fresh), "/testbed", store=store)
    assert json.loads(scrubbed.labels["history:/testbed"])["objects_after"] == 0

    def staged(root: Path) -> None:
        fresh(root)
        git(root / "testbed", "hash-object", "-w", "--stdin", stdin="the answer\n")

    with pytest.raises(ConfigError, match="no commit at HEAD"):
        scrub_image(image_of(store, staged), "/testbed", store=store)


def test_what_cannot_be_judged_is_not_used(store: ImageStore, tmp_path: Path) -> None:
    def submodule(root: Path) -> None:
        (root / "testbed").mkdir()
        (root / "testbed/.git").write_text("gitdir: ../elsewhere\n")

    with pytest.raises(ConfigError, match="linked worktree"):
        scrub_image(image_of(store, submodule), "/testbed", store=store)

    def linked(root: Path) -> None:
        make_repository(root / "real")
        (root / "testbed").symlink_to("real")

    with pytest.raises(ConfigError, match="is a link"):
        scrub_image(image_of(store, linked), "/testbed", store=store)


async def test_loose_files_go_to_the_working_directory(store: ImageStore, tmp_path: Path) -> None:
    files = tmp_path / "environment"
    (files / "data").mkdir(parents=True)
    (files / "data/a.csv").write_text("1\n")
    (files / "run.sh").write_text("#!/bin/sh\n")
    (files / "run.sh").chmod(0o755)

    def build(root: Path) -> None:
        (root / "testbed").mkdir(mode=0o700)
        os.chown(root / "testbed", 1000, 1000)
        (root / "testbed/kept").write_text("k")

    image_of(store, build)
    environment = Environment(image="test:image", files=files)
    prepared = await prepare(task_for(tmp_path, environment=environment, carry=Carry("filesystem")), store=store)
    top = prepared.layers[-1].path
    assert (top / "testbed/data/a.csv").read_text() == "1\n"
    assert (top / "testbed/run.sh").stat().st_mode & 0o777 == 0o755
    assert ((top / "testbed").stat().st_uid, (top / "testbed").stat().st_mode & 0o777) == (1000, 0o700)
    assert exists(prepared, "/testbed/kept")


@pytest.mark.parametrize(
    ("user", "owner"),
    [(None, (0, 0)), ("root", (0, 0)), ("agent", (1001, 1002)), ("1001", (1001, 1002)), ("7", (7, 7)), ("7:8", (7, 8))],
)
async def test_loose_files_belong_to_the_agents_user(
    store: ImageStore, tmp_path: Path, user: str | None, owner: tuple[int, int]
) -> None:
    files = tmp_path / "environment"
    files.mkdir()
    (files / "a").write_text("1")
    (files / "a").chmod(0o600)

    def build(root: Path) -> None:
        (root / "etc").mkdir()
        (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:1001:1002::/:/bin/sh\n")

    image_of(store, build)
    environment = Environment(image="test:image", files=files, workdir="/work/here")
    task = task_for(tmp_path, environment=environment, carry=Carry("filesystem"), agent_user=user)
    top = (await prepare(task, store=store)).layers[-1].path
    for path in (top / "work/here", top / "work/here/a"):
        assert (path.stat().st_uid, path.stat().st_gid) == owner
    assert (top / "work/here/a").stat().st_mode & 0o777 == 0o644
    assert (top / "work").stat().st_uid == 0


async def test_a_user_that_the_image_does_not_have(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    image_of(store, lambda root: (root / "testbed").mkdir())
    environment = Environment(image="test:image", files=tmp_path / "environment")
    with pytest.raises(ConfigError, match="no user 'ghost'"):
        await prepare(task_for(tmp_path, environment=environment, agent_user="ghost"), store=store)


def test_a_proof_is_remembered_and_survives_pruning(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(root: Path) -> None:
        make_repository(root / "testbed")
        add_future(root / "testbed")

    image = image_of(store, build)
    first = scrub_image(image, "/testbed", store=store)
    with monkeypatch.context() as patch:
        patch.setattr("proctor.tasks.environment.read_history", None)
        again = scrub_image(image, "/testbed", store=store)
    assert again == first
    store.remove(first.ref)
    store.prune()
    assert not first.layers[-1].path.exists()
    assert scrub_image(image, "/testbed", store=store) == first
    assert first.layers[-1].path.exists()
