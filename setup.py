"""Build step: compile the static C binaries (launcher and guest; the probe of the self-test) into the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.develop import develop

ROOT = Path(__file__).parent
SOURCE = ROOT / "src" / "proctor" / "sandbox" / "csrc"
BINARIES = ROOT / "src" / "proctor" / "sandbox" / "_bin"


def compile_init() -> None:
    """Compile csrc into _bin/proctor-init and csrc/probe into _bin/proctor-probe, where they are not up to date."""
    compile_one(SOURCE, BINARIES / "proctor-init")
    compile_one(SOURCE / "probe", BINARIES / "proctor-probe", "-s")


def compile_one(folder: Path, target: Path, *more: str) -> None:
    """Compile a directory's sources into one static program; does nothing where it is up to date."""
    sources = sorted(folder.glob("*.c"))
    inputs = [*sources, *folder.glob("*.h")]
    if not sources or not sys.platform.startswith("linux"):
        return
    if target.exists() and all(target.stat().st_mtime >= path.stat().st_mtime for path in inputs):
        return
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("proctor: no C compiler found; install gcc and libc6-dev (Debian, Ubuntu), or run scripts/setup")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".new")
    flags = [
        "-std=c11",
        "-O2",
        "-g0",
        "-static",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-D_GNU_SOURCE",
        "-fno-strict-aliasing",
    ]
    subprocess.run([compiler, *flags, *more, "-o", str(temporary), *map(str, sources)], check=True)
    os.replace(temporary, target)


class BuildPy(build_py):
    """`build_py` that compiles first, so that wheels carry the binary."""

    def run(self) -> None:
        compile_init()
        super().run()


class Develop(develop):
    """`develop` that compiles first, so that editable installs have the binary too."""

    def run(self) -> None:
        compile_init()
        super().run()


setup(cmdclass={"build_py": BuildPy, "develop": Develop})
