"""Which Python a task wants, and the image that has it.

A Debian release whose own python3 is of the wanted series is the first choice. Otherwise a directory of this machine
that holds such a Python becomes a read-only toolkit layer at /opt/python/<version> on Debian bookworm: without
caches, test suites and installed packages other than pip and setuptools, and with the shared libraries that the base
lacks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox.contract import Image, ImageError, Layer
from proctor.sandbox.images.debian import RELEASES
from proctor.sandbox.images.room import build_room
from proctor.sandbox.images.tools import Progress, require_root, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proctor.sandbox.images.store import ImageStore, Workspace


TOOLKIT_BASE = "debian:bookworm"
PREFIX = "/opt/python"
_COMMON_PLACES = ("~/.pyenv/versions/*", "/opt/python*", "/opt/python/*", "/usr/local")
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_DROPPED_BELOW_LIB = frozenset({"idlelib", "tkinter", "turtledemo", "turtle.py"})
_DROPPED_MODULES = re.compile(
    r"(_tkinter|_testcapi|_testbuffer|_testinternalcapi|_testclinic|_ctypes_test|xxlimited).*\.so"
)
_KEPT_PACKAGES = re.compile(r"(pip|setuptools|wheel|pkg_resources|_distutils_hack|distutils-precedence\.pth)(-.*)?")
_SYSTEM_LIBRARIES = re.compile(
    r"(ld-linux.*|libc|libm|libdl|libpthread|librt|libutil|libresolv|libnsl|linux-vdso)\.so.*"
)


@dataclass(frozen=True, slots=True)
class PythonBase:
    """An image with the wanted Python: its reference and the interpreter's path inside."""

    ref: str
    python: str


@dataclass(frozen=True, slots=True)
class FoundPython:
    """A Python installation of this machine."""

    prefix: Path
    version: str


def series_of(wanted: str) -> str:
    """`3.9` for `3.9` and for `3.9.18`."""
    return ".".join(wanted.split(".")[:2])


def python_places() -> list[Path]:
    """Directories that may hold a Python: `$PROCTOR_PYTHONS` (a path list), then the common places."""
    patterns = [item for item in os.environ.get("PROCTOR_PYTHONS", "").split(":") if item] + list(_COMMON_PLACES)
    return [path for pattern in patterns for path in _expand(pattern)]


def _expand(pattern: str) -> Iterator[Path]:
    path = Path(pattern).expanduser()
    yield from sorted(path.parent.glob(path.name)) if "*" in path.name else [path]


def find_pythons() -> list[FoundPython]:
    """Every installation in those places that says its version and lies below its own prefix."""
    found = []
    for prefix in python_places():
        programs = [
            item for item in sorted((prefix / "bin").glob("python[23].*")) if re.fullmatch(r"python\d\.\d+", item.name)
        ]
        for program in programs:
            result = subprocess.run([program, "-IS", "-V"], capture_output=True, text=True, check=False)
            match = _VERSION.search(result.stdout + result.stderr)
            if result.returncode == 0 and match:
                found.append(FoundPython(prefix.resolve(), match.group(0)))
    return found


def choose_python(wanted: str, found: list[FoundPython]) -> FoundPython:
    """The exact version if it is there, else the newest of the series; ImageError names the series."""
    series = series_of(wanted)
    same = [item for item in found if series_of(item.version) == series]
    if not same:
        raise ImageError(
            f"no Python {series} on this machine, and no Debian release has it",
            field="python",
            remedy=f"install one in some directory and add that to PROCTOR_PYTHONS (series {series})",
        )
    exact = [item for item in same if item.version == wanted]
    return exact[0] if exact else max(same, key=lambda item: [int(part) for part in item.version.split(".")])


async def python_base(wanted: str, *, store: ImageStore, progress: Progress = silent) -> PythonBase:
    """The image for a Python series or version (`3.9`, `3.6.15`), built if it is not here yet.

    The series decides: a release of Debian that has it is taken whatever its patch level.
    """
    from proctor.sandbox.images.build import ensure_image

    series = series_of(wanted)
    for release, has in RELEASES.items():
        if has == series:
            await ensure_image(f"debian:{release}", store=store, progress=progress)
            return PythonBase(f"debian:{release}", "/usr/bin/python3")
    base = await ensure_image(TOOLKIT_BASE, store=store, progress=progress)
    return await toolkit_image(wanted, base, store=store, progress=progress)


async def toolkit_image(wanted: str, base: Image, *, store: ImageStore, progress: Progress = silent) -> PythonBase:
    """`base` with a Python of this machine in a layer above it."""
    found = await anyio.to_thread.run_sync(find_pythons)
    chosen = choose_python(wanted, found)
    ref = f"{base.ref if not base.ref.startswith('sha256:') else 'image:' + base.digest[7:19]}-python{chosen.version}"
    python = f"{PREFIX}/{chosen.version}/bin/python{series_of(chosen.version)}"
    digest = store.find_digest(ref)
    if digest is not None and store.resolve(digest).labels.get("base") == base.digest:
        return PythonBase(ref, python)
    require_root("a Python toolkit layer")
    progress(0, 2, f"importing Python {chosen.version} as a toolkit layer")
    with store.workspace() as workspace:
        workspace.hold(base.layers)
        toolkit = await anyio.to_thread.run_sync(_import_toolkit, chosen, base, workspace)
        progress(1, 2, "library cache")
        # Compiled once here, or every sandbox would compile the standard library into its own disk.
        check = (
            f"ldconfig && rm -rf /var/cache/ldconfig && {python} -c 'import ssl, sqlite3, zlib, ctypes, venv'"
            f" && {python} -m compileall -q {PREFIX}/{chosen.version}/lib/python{series_of(chosen.version)}"
        )
        async with build_room([*base.layers, toolkit], workspace, title=ref) as room:
            await room.run(check, cwd="/", env=base.env, what=f"Python {chosen.version}", progress=progress, total=2)
            upper = await room.finish()
        cache = await anyio.to_thread.run_sync(workspace.commit, upper)
        path = base.env.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        store.put(
            ref,
            [*base.layers, toolkit, cache],
            env={**base.env, "PATH": f"{PREFIX}/{chosen.version}/bin:{path}"},
            workdir=base.workdir,
            user=base.user,
            labels={**base.labels, "base": base.digest, "python.version": chosen.version},
        )
    return PythonBase(ref, python)


def _import_toolkit(chosen: FoundPython, base: Image, workspace: Workspace) -> Layer:
    """The layer: the installation, moved, and a line that tells the dynamic linker where its libraries are."""
    root = workspace.directory("python")
    home = root / PREFIX[1:] / chosen.version
    for parent in ("opt", "opt/python", "etc", "etc/ld.so.conf.d"):
        (root / parent).mkdir(mode=0o755)
    shutil.copytree(chosen.prefix, home, symlinks=True, ignore=_dropper(chosen.prefix, series_of(chosen.version)))
    _relocate_scripts(home, chosen.prefix)
    _add_libraries(home, base)
    (root / "etc/ld.so.conf.d" / f"python-{chosen.version}.conf").write_text(f"{PREFIX}/{chosen.version}/lib\n")
    _own_by_root(root)
    return workspace.commit(root, deletions=False)


def _dropper(prefix: Path, series: str) -> Callable[[str, list[str]], set[str]]:
    """What `shutil.copytree` leaves out: caches, static libraries, test suites, windows, installed packages."""
    lib = prefix / "lib" / f"python{series}"

    def ignore(folder: str, names: list[str]) -> set[str]:
        here = Path(folder)
        dropped = {name for name in names if name == "__pycache__" or name.endswith((".pyc", ".a"))}
        if here == prefix:
            dropped |= set(names) - {"bin", "lib", "include"}
        elif here == prefix / "bin":
            dropped |= {name for name in names if not re.fullmatch(r"(python|pip|pydoc)[0-9.m]*(-config)?", name)}
        elif here == prefix / "lib":
            dropped |= {name for name in names if name != lib.name and not name.startswith("libpython")}
        elif here == lib:
            dropped |= _DROPPED_BELOW_LIB & set(names)
        elif here == lib / "lib-dynload":
            dropped |= {name for name in names if _DROPPED_MODULES.fullmatch(name)}
        elif here == lib / "test":
            dropped |= set(names) - {"__init__.py", "support"}
        elif here == lib / "site-packages":
            dropped |= {name for name in names if not _KEPT_PACKAGES.fullmatch(name)}
        elif here.parent == lib:
            dropped |= {"test", "tests"} & set(names)
        return dropped

    return ignore


def _own_by_root(root: Path) -> None:
    for folder, _, files in os.walk(root):
        os.chown(folder, 0, 0)
        for name in files:
            os.chown(os.path.join(folder, name), 0, 0, follow_symlinks=False)


def _relocate_scripts(home: Path, prefix: Path) -> None:
    """Scripts in bin name their interpreter by its old place."""
    inside = f"{PREFIX}/{home.name}".encode()
    for path in (home / "bin").iterdir():
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if data.startswith(b"#!"):
            path.write_bytes(data.replace(os.fsencode(prefix), inside))


def _add_libraries(home: Path, base: Image) -> None:
    """Copy the shared libraries that the interpreter and its modules need and the base does not have to <home>/lib."""
    needed: dict[str, Path] = {}
    for path in _elf_files(home):
        needed |= _needed(path)
    for name, source in needed.items():
        if not _SYSTEM_LIBRARIES.match(name) and not name.startswith("libpython") and not _base_has(base, name):
            shutil.copy(source, home / "lib" / name)


def _elf_files(home: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(home):
        for name in files:
            path = Path(folder, name)
            if path.is_symlink() or not (".so" in name or Path(folder) == home / "bin"):
                continue
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def _needed(path: Path) -> dict[str, Path]:
    """Libraries that `ldd` resolves for an ELF file on this machine."""
    result = subprocess.run(
        ["ldd", path], capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]}
    )
    pairs = re.findall(r"^\s*(\S+) => (/\S+)", result.stdout, re.MULTILINE)
    return {name: Path(where) for name, where in pairs}


def _base_has(base: Image, name: str) -> bool:
    folders = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib", "usr/local/lib", "lib", "lib64")
    return any(os.path.lexists(layer.path / folder / name) for layer in base.layers for folder in folders)
