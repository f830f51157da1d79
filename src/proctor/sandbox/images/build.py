"""Building images: recipes step by step, with each step a layer that is kept and found again by what went into it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.common import ConfigError, atomic_write, digest_file, digest_json, digest_tree
from proctor.sandbox.contract import Image, ImageError, Layer
from proctor.sandbox.images import archive, assets
from proctor.sandbox.images.debian import RELEASES, build_debian
from proctor.sandbox.images.machine import build_environment
from proctor.sandbox.images.manifest import is_digest
from proctor.sandbox.images.python import python_base, series_of, toolkit_image
from proctor.sandbox.images.recipe import Copy, Git, Recipe, Step, Unpack, load_recipe
from proctor.sandbox.images.room import build_room, pack
from proctor.sandbox.images.tools import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.sandbox.images.room import BuildRoom
    from proctor.sandbox.images.store import ImageStore, Workspace

_BUILDER_VERSION = 2
RUN_ENV = "env.run"
"""Label that names the variables which hold at run time but not while building."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A repository with one commit that depends on its content alone, or on one commit of a history that was there. Then the
# proof: every object in the store is reachable from that commit, or the step fails.
_GIT = r"""
set -e
git config --global --add safe.directory "$PWD" 2>/dev/null || true
export GIT_AUTHOR_NAME=proctor GIT_AUTHOR_EMAIL=proctor@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=proctor GIT_COMMITTER_EMAIL=proctor@localhost GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
[ ! -e .git ] || { echo "there is a repository already"; exit 1; }
git init -q --template= .
git symbolic-ref HEAD refs/heads/main
git -c core.autocrlf=false -c core.safecrlf=false add -A -f .
git -c commit.gpgsign=false commit -q --allow-empty --no-verify -m "$MESSAGE"
git reflog expire --expire=now --all
rm -rf .git/logs .git/COMMIT_EDITMSG .git/ORIG_HEAD .git/FETCH_HEAD
git -c gc.auto=0 -c pack.threads=1 repack -q -a -d
git prune --expire=now
git rev-list --objects HEAD | cut -d' ' -f1 | sort > /tmp/.reachable
git cat-file --batch-all-objects --batch-check='%(objectname)' | sort > /tmp/.present
cmp -s /tmp/.reachable /tmp/.present || { echo "objects outside the commit remain"; exit 1; }
[ "$(git rev-list --all --count)" = 1 ]
[ -z "$(git status --porcelain)" ] || { echo "the commit does not hold every file"; exit 1; }
rm -f /tmp/.reachable /tmp/.present
git config --global --unset-all safe.directory || true
[ -s "$HOME/.gitconfig" ] || rm -f "$HOME/.gitconfig"
"""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every step of a recipe shares."""

    recipe: Recipe
    folder: Path
    base: Image
    python: str | None
    env: Mapping[str, str]
    """Of the image and of its steps."""
    run_env: Mapping[str, str]
    """Of the image only."""
    sources: Mapping[str, Image]
    """Images that steps copy from."""


async def ensure_image(ref: str, *, store: ImageStore, progress: Progress = silent) -> Image:
    """The image `ref`, built first if it is one that we know how to build and it is not here, or its recipe changed."""
    if ref == "host" or is_digest(ref):
        return store.resolve(ref)
    if store.find_digest(ref) is not None:
        image = store.resolve(ref)
        path = assets.recipe_path(ref)
        if path is None or image.labels.get("recipe") == _recipe_digest(load_recipe(path)):
            return image
    return await build_image(ref, store=store, progress=progress)


async def build_image(ref: str, *, store: ImageStore, progress: Progress = silent) -> Image:
    """Build one of the images that Proctor knows by name: `host`, `debian:<release>`, or a packaged recipe."""
    if ref == "host":
        return store.resolve(ref)
    name, _, tag = ref.partition(":")
    if name == "debian" and tag in RELEASES:
        return await build_debian(tag, store=store, progress=progress)
    path = assets.recipe_path(ref)
    if path is not None:
        return await build_recipe(path, store=store, progress=progress, ref=ref)
    known = ["host", *(f"debian:{release}" for release in RELEASES), *assets.recipe_refs()]
    raise ImageError(
        f"no recipe is known for {ref}",
        field="image",
        remedy=f"known: {', '.join(known)}; or proctor image import docker://…",
    )


async def build_recipe(
    source: Path | Recipe,
    *,
    store: ImageStore,
    progress: Progress | None = None,
    ref: str | None = None,
    folder: Path | None = None,
) -> Image:
    """Build a recipe and let `ref` (default: a name made of its digest) point at the result.

    `folder` is where the recipe's files are (default: beside it). Steps that were built before are found in the store.
    """
    progress = progress or silent
    recipe = source if isinstance(source, Recipe) else load_recipe(source)
    folder = folder or (source.parent if isinstance(source, Path) else Path.cwd())
    plan = await _plan(recipe, folder, store, progress)
    layers = list(plan.base.layers)
    with store.workspace() as workspace:
        workspace.hold(layers)
        for number, step in enumerate(recipe.steps):
            progress(number, len(recipe.steps), step.title)
            layer = await _build_step(plan, step, layers, workspace, store, progress, number)
            if layer is not None:
                layers.append(layer)
        labels = {**plan.base.labels, "recipe": _recipe_digest(recipe), "base": plan.base.digest}
        if plan.python:
            labels["python"] = plan.python
        if plan.run_env:
            labels[RUN_ENV] = " ".join(sorted(plan.run_env))
        digest = digest_json([[layer.digest for layer in layers], labels["recipe"]])
        image = store.put(
            ref or f"recipe:{digest[7:23]}",
            layers,
            env={**plan.env, **plan.run_env},
            workdir=recipe.workdir,
            user=recipe.user,
            labels=labels,
        )
    progress(len(recipe.steps), len(recipe.steps), f"{image.ref} {image.digest[:19]}")
    return image


def _recipe_digest(recipe: Recipe) -> str:
    return digest_json(recipe.model_dump(mode="json"))


async def _plan(recipe: Recipe, folder: Path, store: ImageStore, progress: Progress) -> _Plan:
    python = None
    if recipe.base is None:
        assert recipe.python is not None
        chosen = await python_base(recipe.python, store=store, progress=progress)
        base, python = store.resolve(chosen.ref), chosen.python
    else:
        base = await ensure_image(recipe.base, store=store, progress=progress)
        if recipe.python is not None:
            release = base.labels.get("debian.release", "")
            if RELEASES.get(release) == series_of(recipe.python):
                python = "/usr/bin/python3"
            else:
                chosen = await toolkit_image(recipe.python, base, store=store, progress=progress)
                base, python = store.resolve(chosen.ref), chosen.python
    if base.mounts:
        raise ConfigError(f"{base.ref} shows the machine itself and cannot be built upon", field="base")
    held_back = base.labels.get(RUN_ENV, "").split()
    env = {"PATH": _PATH, **{name: value for name, value in base.env.items() if name not in held_back}, **recipe.env}
    run_env = {**{name: base.env[name] for name in held_back if name in base.env}, **recipe.run_env}
    names = [step.copy_.image for step in recipe.steps if step.copy_ is not None and step.copy_.image is not None]
    sources = {name: await ensure_image(name, store=store, progress=progress) for name in names}
    return _Plan(recipe, folder, base, python, env, run_env, sources)


async def _build_step(
    plan: _Plan,
    step: Step,
    layers: list[Layer],
    workspace: Workspace,
    store: ImageStore,
    progress: Progress,
    number: int,
) -> Layer | None:
    """The layer of one step, or None when it changes nothing."""
    key = await anyio.to_thread.run_sync(_cache_key, plan, step, layers)
    cache = store.root / "cache" / key.removeprefix("sha256:")
    if cache.is_file():
        digest = cache.read_text().strip()
        if digest == "none":
            return None
        if store.layer_path(digest).is_dir():
            layer = store.layer(digest)
            workspace.hold([layer])
            return layer
    async with build_room(layers, workspace, title=step.title) as room:
        await _perform(plan, step, room, workspace, progress, number)
        upper = await room.finish()
    changed = any(upper.iterdir())
    made = await anyio.to_thread.run_sync(workspace.commit, upper) if changed else None
    atomic_write(cache, (made.digest if made and made.digest else "none").encode() + b"\n")
    return made


def _cache_key(plan: _Plan, step: Step, layers: list[Layer]) -> str:
    content: str | None = None
    if step.copy_ is not None and step.copy_.image is not None:
        content = plan.sources[step.copy_.image].digest
    elif step.copy_ is not None:
        source = plan.folder / step.copy_.source
        if source.is_dir():
            content = digest_tree(source)
        elif source.is_file():
            content = digest_file(source)
        else:
            raise ConfigError(f"{source} does not exist", field="copy.from")
    below = [layer.digest for layer in layers]
    env = dict(plan.env) if step.run is not None else None
    document = step.model_dump(mode="json")
    return digest_json([_BUILDER_VERSION, below, document, env, plan.python, content, plan.recipe.workdir])


async def _perform(
    plan: _Plan, step: Step, room: BuildRoom, workspace: Workspace, progress: Progress, number: int
) -> None:
    total = len(plan.recipe.steps)
    where = f"step {number + 1} ({step.title})"
    if step.run is not None:
        env = {"HOME": "/root", **plan.env, **build_environment(), **step.env}
        if plan.python:
            env["PYTHON"] = plan.python
        cwd = step.cwd or plan.recipe.workdir
        await room.run(step.run, cwd=cwd, env=env, what=where, progress=progress, step=number, total=total)
    elif step.git is not None:
        await _git(step.git, room, where)
    else:
        packed = workspace.path / "files.tar"
        to = await anyio.to_thread.run_sync(_pack_step, plan, step, workspace, packed)
        await room.unpack(packed, to)


async def _git(step: Git, room: BuildRoom, where: str) -> None:
    env = {"PATH": _PATH, "HOME": "/root", "MESSAGE": step.message, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    await room.run(f"sh -c {shlex.quote(_GIT)}", cwd=step.path, env=env, what=where)


def _pack_step(plan: _Plan, step: Step, workspace: Workspace, target: Path) -> str:
    """Write the tar that a copy, unpack or write step extracts; returns the directory it goes to."""
    if step.write is not None:
        file = workspace.directory("write") / "content"
        file.write_text(step.write.text, encoding="utf-8")
        file.chmod(int(step.write.mode, 8))
        parent, _, name = step.write.path.rpartition("/")
        pack([(file, name)], target)
        return parent or "/"
    if step.copy_ is not None:
        source = _copy_source(plan, step.copy_)
        if source.is_dir():
            pack([(child, child.name) for child in sorted(source.iterdir())], target)
            return step.copy_.to
        to = step.copy_.to + source.name if step.copy_.to.endswith("/") else step.copy_.to
        parent, _, name = to.rpartition("/")
        pack([(source, name)], target)
        return parent or "/"
    assert step.unpack is not None
    _unpacked(plan, step.unpack, workspace, target)
    return step.unpack.to


def _copy_source(plan: _Plan, copy: Copy) -> Path:
    """Where the files of a copy step are: beside the recipe, or in the one layer of an image that has them."""
    if copy.image is None:
        return plan.folder / copy.source
    image = plan.sources[copy.image]
    holders = [layer.path / copy.source[1:] for layer in image.layers if (layer.path / copy.source[1:]).exists()]
    if len(holders) != 1:
        raise ConfigError(f"{copy.source} is in {len(holders)} layers of {image.ref}, not in one", field="copy.from")
    return holders[0]


def _unpacked(plan: _Plan, unpack: Unpack, workspace: Workspace, target: Path) -> None:
    """Check an archive's digest and rewrite it as a plain tar of ours."""
    path = plan.folder / unpack.archive
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", field="unpack.archive")
    found = digest_file(path).removeprefix("sha256:")
    if found != unpack.sha256:
        raise ConfigError(f"{path.name} has sha256 {found}, not {unpack.sha256}", field="unpack.sha256")
    tree = workspace.directory("archive")
    with path.open("rb") as packed, archive.decompressed(packed, path.name) as stream:
        archive.extract(stream, tree, what=path.name, deletions=False)
    pack([(child, child.name) for child in sorted(tree.iterdir())], target)
