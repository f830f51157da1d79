"""`environment/Dockerfile` through buildah, on bases from our own store.

A base name is looked up in this order: an image of that name in the store; its registry, unless offline; the table in
assets/bases.toml. buildah gets the base once (as an OCI layout), builds in a storage of its own below the store, and
only the layers above the base come back, so m tasks on n bases are m + n layers.

Package registries are reached while building and not at run time: variables for that are in the base's config for the
time of the build, and are taken out again afterwards unless the Dockerfile set them itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import anyio

from proctor.common import ConfigError, atomic_write, digest_json, digest_tree
from proctor.sandbox.contract import Image, ImageError
from proctor.sandbox.images import assets, oci
from proctor.sandbox.images.build import RUN_ENV, ensure_image
from proctor.sandbox.images.export import export_layout
from proctor.sandbox.images.machine import BUILD_DIR, build_environment, build_files
from proctor.sandbox.images.manifest import check_ref
from proctor.sandbox.images.tools import Progress, require_root, require_tool, run_tool, silent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from proctor.sandbox.images.store import ImageStore, Workspace

Pull = Literal["auto", "never"]
_BUILDER_VERSION = 4
_PULL_TIMEOUT_S = 20.0
_FROM = re.compile(r"^(\s*FROM\s+(?:--platform=\S+\s+)?)(\S+)(\s+AS\s+(\S+))?\s*$", re.IGNORECASE)
_ARG = re.compile(r"^\s*ARG\s+([A-Za-z_]\w*)(?:=(.*))?\s*$", re.IGNORECASE)
_COPY_FROM = re.compile(r"^(\s*(?:COPY|ADD)\s+(?:--\S+\s+)*?--from=)(\S+)(\s.*)$", re.IGNORECASE | re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True, slots=True)
class BaseUse:
    """One place where a Dockerfile names an image: line index, the name, and the text around it."""

    line: int
    name: str
    before: str
    after: str


def base_uses(text: str, *, name: str = "Dockerfile") -> list[BaseUse]:
    """Every image that a Dockerfile starts from or copies from (stages of its own and `scratch` are not images)."""
    arguments: dict[str, str] = {}
    stages: set[str] = set()
    uses: list[BaseUse] = []
    seen_from = False
    for number, line in enumerate(text.splitlines()):
        if not seen_from and (match := _ARG.match(line)):
            arguments[match[1]] = (match[2] or "").strip().strip("\"'")
        elif match := _FROM.match(line):
            seen_from = True
            image = _expand(match[2], arguments)
            if image.lower() not in stages and image != "scratch":
                uses.append(BaseUse(number, image, match[1], match[3] or ""))
            if match[4]:
                stages.add(match[4].lower())
        elif re.match(r"\s*FROM\b", line, re.IGNORECASE):
            raise ConfigError("this FROM line cannot be read", field=f"{name}:{number + 1}")
        elif match := _COPY_FROM.match(line):
            image = match[2]
            if image.lower() not in stages and not image.isdigit():
                uses.append(BaseUse(number, image, match[1], match[3]))
    if not seen_from:
        raise ConfigError("there is no FROM line", field=name)
    return uses


def _expand(text: str, arguments: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return arguments.get(match[1] or match[3], "") or match[2] or ""

    return _VARIABLE.sub(value, text)


def replace_bases(text: str, uses: list[BaseUse], names: Mapping[str, str]) -> str:
    """The Dockerfile with each image replaced by `names`; everything else byte for byte."""
    lines = text.splitlines(keepends=True)
    for use in uses:
        ending = "\n" if lines[use.line].endswith("\n") else ""
        lines[use.line] = f"{use.before}{names[use.name]}{use.after}".rstrip("\n") + ending
    return "".join(lines)


async def build_dockerfile(
    source: Path,
    *,
    store: ImageStore,
    progress: Progress | None = None,
    ref: str | None = None,
    pull: Pull = "auto",
    timeout_s: float | None = None,
) -> Image:
    """Build a Dockerfile (or the directory that holds one; it is the context) and let `ref` point at the result.

    What was built before from the same files on the same bases is found in the store. ImageError with the build's
    last lines when it fails or takes longer than `timeout_s` seconds.
    """
    progress = progress or silent
    path, text = _read(source)
    uses = base_uses(text, name=str(path))
    bases = {use.name: await find_base(use.name, store=store, progress=progress, pull=pull) for use in uses}
    context = await anyio.to_thread.run_sync(_context_digest, path.parent)
    key = digest_json([_BUILDER_VERSION, text, context, {name: base.digest for name, base in bases.items()}])
    name = ref or f"dockerfile:{key[7:23]}"
    cache = store.root / "cache" / key.removeprefix("sha256:")
    if cache.is_file() and store.find_digest(digest := cache.read_text().strip()):
        store.tag(name, digest)
        return store.resolve(name)
    require_root("a Dockerfile build")
    builder = _Builder(store, progress)
    with store.workspace() as workspace:
        for base in bases.values():
            workspace.hold(base.layers)
        with anyio.move_on_after(timeout_s) as scope:
            image = await builder.build(path, text, uses, bases, name, workspace)
        if scope.cancelled_caught:
            raise ImageError(f"building {path} took longer than {timeout_s} s", remedy="raise build_timeout_sec")
    atomic_write(cache, image.digest.encode() + b"\n")
    return image


def _read(source: Path) -> tuple[Path, str]:
    path = source / "Dockerfile" if source.is_dir() else source
    try:
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the Dockerfile: {error}", field=str(path)) from error


def _context_digest(folder: Path) -> str:
    """Names, modes, links and contents of the build context."""
    return digest_tree(folder)


async def find_base(name: str, *, store: ImageStore, progress: Progress = silent, pull: Pull = "auto") -> Image:
    """The image that stands for a base name (see the module's first lines for the order)."""
    plain = name.removeprefix("docker.io/").removeprefix("library/")
    local = _store_name(plain)
    if local is not None and store.find_digest(local) is not None:
        return store.resolve(local)
    stand_in = assets.base_for(plain)
    if pull == "auto" and not os.environ.get("PROCTOR_OFFLINE") and not _recently_unreachable(store):
        try:
            with anyio.fail_after(_PULL_TIMEOUT_S if stand_in else 3600):
                return await oci.import_image(
                    f"docker://{name}", ref=local or f"pulled:{digest_json(name)[7:23]}", store=store, progress=progress
                )
        except (ImageError, TimeoutError) as error:
            if stand_in is None:
                raise ImageError(
                    f"the base image {name} cannot be pulled, and no local image stands for it: {error}",
                    field="FROM",
                    remedy=f"proctor image import FILE --ref {local or name}",
                ) from error
            atomic_write(store.root / "cache" / "registry-unreachable", b"")
    if stand_in is None:
        raise ImageError(
            f"no local image stands for the base image {name}",
            field="FROM",
            remedy=f"proctor image import docker://{name} --ref {local or name}",
        )
    progress(1, 1, f"{name} is not at hand; {stand_in} stands for it")
    return await ensure_image(stand_in, store=store, progress=progress)


def _store_name(name: str) -> str | None:
    try:
        return check_ref(name if ":" in name.rpartition("/")[2] else f"{name}:latest")
    except ImageError:
        return None


def _recently_unreachable(store: ImageStore) -> bool:
    """True for ten minutes after a pull failed: a trial run of many tasks must not wait for each."""
    try:
        return time.time() - (store.root / "cache" / "registry-unreachable").stat().st_mtime < 600
    except FileNotFoundError:
        return False


def _buildah(root: Path) -> list[str]:
    """The command, in pid and mount namespaces of its own: a build that fails or is stopped leaves neither a process
    nor a mount behind, however it was detached."""
    flags = ["--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    storage = ["--root", str(root / "storage"), "--runroot", str(root / "run"), "--storage-driver", "overlay"]
    return [require_tool("unshare", "util-linux"), *flags, require_tool("buildah"), *storage]


class _Builder:
    """buildah with a storage of its own below the store."""

    def __init__(self, store: ImageStore, progress: Progress) -> None:
        self._store = store
        self._progress = progress
        root = store.root / "buildah"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._tool = _buildah(root)

    async def _run(self, *arguments: str, what: str, env: Mapping[str, str] | None = None) -> str:
        return await run_tool([*self._tool, *arguments], what=what, env=env, on_line=self._progress, step=1, total=3)

    async def build(
        self, path: Path, text: str, uses: list[BaseUse], bases: Mapping[str, Image], ref: str, workspace: Workspace
    ) -> Image:
        """Give buildah the bases, build, take the new layers."""
        extra = build_environment()
        names: dict[str, str] = {}
        known: dict[str, str] = {}
        for name, base in bases.items():
            self._progress(0, 3, f"base {name} is {base.ref}")
            names[name], diff_ids = await self._provide(base, extra, workspace)
            known.update(zip(diff_ids, (str(layer.digest) for layer in base.layers), strict=True))
        replaced = workspace.path / "Dockerfile"
        replaced.write_text(replace_bases(text, uses, names), encoding="utf-8")
        folder = workspace.directory("build-files")
        for file_name, data in build_files().items():
            (folder / file_name).write_bytes(data)
        target = f"localhost/proctor/built:{digest_json(ref)[7:23]}"
        self._progress(1, 3, f"building {path}")
        await self._run(
            "bud", "--isolation", "chroot", "--pull-never", "--layers", "--format", "oci", "--timestamp", "0",
            "--volume", f"{folder}:{BUILD_DIR}:ro", "--file", str(replaced), "--tag", target, str(path.parent),
            what=f"building {path}", env={"TMPDIR": str(workspace.path)},
        )  # fmt: skip
        self._progress(2, 3, "storing the layers")
        layout = workspace.path / "result"
        # buildah asks the target for a blob before it writes one: what is there in name is not copied again.
        (layout / "blobs/sha256").mkdir(parents=True)
        for diff_id in known:
            (layout / "blobs/sha256" / diff_id[7:]).touch()
        await self._run("push", "--disable-compression", target, f"oci:{layout}:image", what="reading the built image")
        return await anyio.to_thread.run_sync(self._collect, layout, known, bases, uses, extra, ref, workspace)

    async def _provide(self, base: Image, extra: Mapping[str, str], workspace: Workspace) -> tuple[str, list[str]]:
        """Let buildah have `base`; returns its name there and the diff ids of its layers."""
        held_back = set(base.labels.get(RUN_ENV, "").split())
        env = {name: value for name, value in base.env.items() if name not in held_back} | dict(extra)
        key = digest_json([_BUILDER_VERSION, base.digest, env])[7:39]
        name = f"localhost/proctor/base:{key}"
        record = self._store.root / "cache" / f"base-{key}.json"
        present = await self._run("images", "--quiet", "--no-trunc", what="listing builder images")
        if record.is_file():
            fact = json.loads(record.read_bytes())
            if fact["image"] in present:
                return name, list(fact["diff_ids"])
        layout = workspace.path / f"base-{key}"
        diff_ids = await anyio.to_thread.run_sync(lambda: export_layout(base, layout, env=env))
        output = await self._run("pull", "--policy", "always", f"oci:{layout}:image", what=f"handing over {base.ref}")
        image = output.strip().splitlines()[-1]
        await self._run("tag", image, name, what=f"naming {base.ref}")
        shutil.rmtree(layout)
        atomic_write(record, json.dumps({"image": image, "diff_ids": diff_ids}).encode())
        return name, diff_ids

    def _collect(
        self,
        layout: Path,
        known: Mapping[str, str],
        bases: Mapping[str, Image],
        uses: list[BaseUse],
        extra: Mapping[str, str],
        ref: str,
        workspace: Workspace,
    ) -> Image:
        manifest, _ = oci.find_manifest(layout, None)
        config = oci.read_document(layout, manifest.get("config"), "image config")
        diff_ids = [str(item) for item in config["rootfs"]["diff_ids"]]
        shared = 0
        while shared < len(diff_ids) and diff_ids[shared] in known:
            shared += 1
        layers = [self._store.layer(known[item]) for item in diff_ids[:shared]]
        blobs = oci.layer_blobs(layout, manifest, config)[shared:]
        layers += oci.import_layers(
            blobs, self._store, workspace, self._progress, first=not layers, unwanted=(BUILD_DIR,)
        )
        inner = config.get("config") or {}
        from_names = [use.name for use in uses if use.before.strip().upper().startswith("FROM")]
        base = next((bases[name] for name in reversed(from_names) if bases[name].layers[0] in layers), None)
        env = final_env(oci.config_env(inner), extra, base)
        labels = {"source": "dockerfile", **({"base": base.digest} if base else {})}
        if base and RUN_ENV in base.labels:
            labels[RUN_ENV] = base.labels[RUN_ENV]
        return self._store.put(
            ref,
            layers,
            env=env,
            workdir=inner.get("WorkingDir") or "/",
            user=inner.get("User") or "root",
            labels=labels,
        )


def final_env(built: Mapping[str, str], extra: Mapping[str, str], base: Image | None) -> dict[str, str]:
    """The environment to run with: what the build had, without what was there for the build only.

    A variable that still has its build value goes back to the base's (or away); one that the Dockerfile changed
    stays; those that the base holds back while building come back unless the Dockerfile set them.
    """
    before = dict(base.env) if base else {}
    env: dict[str, str] = {}
    for name, value in built.items():
        if extra.get(name) != value:
            env[name] = value
        elif name in before:
            env[name] = before[name]
    for name in (base.labels.get(RUN_ENV, "") if base else "").split():
        if name in before:
            env.setdefault(name, before[name])
    return env


def forget_builds(store: ImageStore) -> None:
    """Remove what buildah keeps below the store, and the memory of earlier steps. Built images stay."""
    import subprocess

    root = store.root / "buildah"
    if root.is_dir():
        tool = _buildah(root)
        for arguments in (["rm", "--all"], ["rmi", "--all", "--force"]):
            done = subprocess.run([*tool, *arguments], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ImageError(f"buildah {arguments[0]} failed: {done.stderr.strip()[-300:]}")
        shutil.rmtree(root)
    shutil.rmtree(store.root / "cache", ignore_errors=True)
