"""`proctor image`: build, import, list and remove images."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proctor.sandbox.contract import Image
    from proctor.sandbox.images import ImageStore


@click.group()
def image() -> None:
    """Build, import, list and remove images.

    \b
    proctor image build debian:bookworm
    proctor image build path/to/environment
    proctor image import saved.tar --ref mine:1
    proctor image ls
    """


class ProgressLine:
    """Shows what a build does: one line that is written over on a terminal, whole lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = (-1, -1)

    def __call__(self, step: int, total: int, text: str) -> None:
        head = f"[{min(step + 1, total)}/{total}] " if total else ""
        if self._terminal:
            width = shutil.get_terminal_size().columns
            sys.stderr.write(f"\r\033[K{(head + text)[: width - 1]}")
            sys.stderr.flush()
        elif (step, total) != self._last:
            # Elsewhere only the beginning of each step: a build prints thousands of lines.
            self._last = (step, total)
            click.echo(head + text, err=True)

    def close(self) -> None:
        """Leave the terminal on a fresh line."""
        if self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _show(result: Image, as_json: bool) -> None:
    size = sum(layer.size_bytes or 0 for layer in result.layers)
    if as_json:
        facts = {"ref": result.ref, "digest": result.digest, "layers": len(result.layers), "size_bytes": size}
        click.echo(json.dumps(facts))
    else:
        click.echo(f"{result.ref}  {result.digest}  {len(result.layers)} layers, {_megabytes(size)}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


@image.command()
@click.argument("source")
@click.option("--ref", help="Name of the result (default: its own for a known image, else one made of its content).")
@click.option("--offline", is_flag=True, help="Do not ask a registry for the bases of a Dockerfile.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def build(source: str, ref: str | None, offline: bool, as_json: bool) -> None:
    """Build SOURCE: a known image (host, debian:bookworm, …), a recipe.toml, a Dockerfile or its directory."""
    import anyio

    from proctor.sandbox.images import ImageStore

    store = ImageStore()
    progress = ProgressLine()
    try:
        result = anyio.run(_builder(source, store, progress, ref, "never" if offline else "auto"))
    finally:
        progress.close()
    _show(result, as_json)


def _builder(
    source: str, store: ImageStore, progress: ProgressLine, ref: str | None, pull: Literal["auto", "never"]
) -> Callable[[], Awaitable[Image]]:
    """What builds SOURCE, told by what is there under that name."""
    from functools import partial

    from proctor.sandbox.images import build_dockerfile, build_image, build_recipe

    path = Path(source)
    if path.is_dir() and not (path / "Dockerfile").is_file() and (path / "recipe.toml").is_file():
        path = path / "recipe.toml"
    if path.is_file() and path.suffix == ".toml":
        return partial(build_recipe, path, store=store, progress=progress, ref=ref)
    if path.exists():
        return partial(build_dockerfile, path, store=store, progress=progress, ref=ref, pull=pull)

    async def known() -> Image:
        made = await build_image(source, store=store, progress=progress)
        if ref is not None:
            store.tag(ref, made.digest)
        return made

    return known


@image.command(name="import")
@click.argument("source")
@click.option("--ref", required=True, help="Name of the result (name:tag).")
@click.option("--tag", help="Which image of an archive or layout that holds several.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def import_(source: str, ref: str, tag: str | None, as_json: bool) -> None:
    """Import SOURCE: a root file system (directory or tar), an OCI layout or archive, a file that docker save wrote,
    or docker://NAME from a registry."""
    import anyio

    from proctor.sandbox.images import ImageStore, import_image

    progress = ProgressLine()

    async def job() -> Image:
        return await import_image(source, ref=ref, store=ImageStore(), progress=progress, tag=tag)

    try:
        result = anyio.run(job)
    finally:
        progress.close()
    _show(result, as_json)


@image.command(name="ls")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_(as_json: bool) -> None:
    """List images; a layer that several share is counted in the size of each."""
    from dataclasses import asdict

    from proctor.sandbox.images import ImageStore

    rows = ImageStore().list()
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows]))
        return
    if not rows:
        click.echo("no images yet; try: proctor image build debian:bookworm")
        return
    width = max(len(row.ref or "-") for row in rows)
    click.echo(f"{'REF':<{width}}  {'DIGEST':<19}  LAYERS  {'SIZE':>12}  {'SHARED':>12}")
    for row in rows:
        sizes = f"{_megabytes(row.size_bytes):>12}  {_megabytes(row.shared_bytes):>12}"
        click.echo(f"{row.ref or '-':<{width}}  {row.digest[:19]}  {row.layers:>6}  {sizes}")


@image.command()
@click.argument("refs", nargs=-1, required=True)
def rm(refs: tuple[str, ...]) -> None:
    """Remove references (name:tag), or images by digest; prune frees the space."""
    from proctor.sandbox.images import ImageStore

    store: ImageStore = ImageStore()
    for ref in refs:
        store.remove(ref)
        click.echo(f"removed {ref}")


@image.command()
@click.option("--high", default="60%", show_default=True, help="Act only when the layers take more (20G, 500M, 60%).")
@click.option("--low", help="Evict until they take no more than this (default: three quarters of --high).")
@click.option("--json", "as_json", is_flag=True, help="Print what was removed as JSON.")
def gc(high: str, low: str | None, as_json: bool) -> None:
    """Evict what was used longest ago from the layer cache; what is in use or was imported by name stays."""
    from dataclasses import asdict

    from proctor.common import ConfigError
    from proctor.sandbox.images import ImageStore
    from proctor.sandbox.images.eviction import evict, mark, usage

    store = ImageStore()
    before = usage(store)
    above = mark(high, before.disk_bytes, "high")
    below = mark(low, before.disk_bytes, "low") if low is not None else above * 3 // 4
    if below > above:
        raise ConfigError(f"{low} is above --high {high}", field="low", remedy="the low mark is where eviction stops")
    done = evict(store, lambda now: now.size_bytes <= (below if before.size_bytes > above else above))
    if as_json:
        click.echo(json.dumps(asdict(done)))
        return
    click.echo(
        f"evicted {done.images} images and {done.layers} layers, {_megabytes(done.freed_bytes)} freed; "
        f"{done.usage.layers} layers with {_megabytes(done.usage.size_bytes)} remain"
    )
    if done.in_use:
        click.echo(f"kept {done.in_use} layers that are in use")


@image.command()
@click.option("--all", "automatic", is_flag=True, help="Also images that builds named by themselves.")
@click.option("--builds", is_flag=True, help="Also forget what builds keep to be faster the next time.")
@click.option("--json", "as_json", is_flag=True, help="Print what was removed as JSON.")
def prune(automatic: bool, builds: bool, as_json: bool) -> None:
    """Remove what no reference names; layers in use stay."""
    from dataclasses import asdict

    from proctor.sandbox.images import ImageStore

    store = ImageStore()
    if builds:
        from proctor.sandbox.images.dockerfile import forget_builds

        forget_builds(store)
    done = store.prune(automatic=automatic)
    if as_json:
        click.echo(json.dumps(asdict(done)))
        return
    click.echo(f"removed {done.images} images and {done.layers} layers, {_megabytes(done.freed_bytes)} freed")
    if done.in_use:
        click.echo(f"kept {done.in_use} layers that are in use")
