"""The store: whole or absent, once by digest, and never pruned under somebody's feet."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox.contract import Image, ImageError
from proctor.sandbox.images import ImageStore

if TYPE_CHECKING:
    from proctor.sandbox.images.store import Workspace

pytestmark = pytest.mark.sandbox


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def tree_with(workspace: Workspace, text: str) -> Path:
    root = workspace.directory("t")
    (root / "etc").mkdir()
    (root / "etc/motd").write_text(text)
    return root


def make(store: ImageStore, ref: str | None, *texts: str) -> Image:
    with store.workspace() as workspace:
        layers = [workspace.commit(tree_with(workspace, text)) for text in texts]
        return store.put(ref, layers)


def test_a_layer_is_stored_once(store: ImageStore) -> None:
    first, second = make(store, "a:1", "x", "y"), make(store, "b:1", "x", "z")
    assert first.layers[0] == second.layers[0]
    assert len([path for path in (store.root / "layers").iterdir() if path.is_dir()]) == 3


def test_layers_are_for_root_only(store: ImageStore) -> None:
    make(store, "a:1", "x")
    assert stat.S_IMODE((store.root / "layers").stat().st_mode) == 0o700


def test_resolve_by_reference_digest_and_prefix(store: ImageStore) -> None:
    image = make(store, "a:1", "x")
    for name in ("a:1", image.digest, image.digest[:20]):
        assert store.resolve(name).digest == image.digest


def test_the_digest_covers_environment_user_and_workdir(store: ImageStore) -> None:
    layers = make(store, None, "x").layers
    variants = [{}, {"env": {"A": "1"}}, {"user": "1000"}, {"workdir": "/app"}, {"labels": {"a": "b"}}]
    assert len({store.put(None, layers, **variant).digest for variant in variants}) == len(variants)  # type: ignore[arg-type]


def test_a_missing_image_names_the_command_that_makes_it(store: ImageStore) -> None:
    with pytest.raises(ImageError, match="proctor image build debian:bookworm"):
        store.resolve("debian:bookworm")


@pytest.mark.parametrize("ref", ["", "UPPER:1", "../x", "a b", "a:", "-a", "x" * 300, "a\n"])
def test_malformed_references_are_refused(store: ImageStore, ref: str) -> None:
    with pytest.raises(ImageError, match="not an image reference"):
        store.resolve(ref)


def test_a_damaged_manifest_is_named(store: ImageStore) -> None:
    image = make(store, "a:1", "x")
    path = store.root / "images" / f"{image.digest[7:]}.json"
    path.write_bytes(path.read_bytes().replace(b'"root"', b'"toor"'))
    with pytest.raises(ImageError, match="damaged"):
        store.resolve("a:1")


def test_a_changed_layer_is_found_by_verification(store: ImageStore) -> None:
    layer = make(store, "a:1", "x").layers[0]
    assert layer.digest is not None
    store.verify_layer(layer.digest)
    (layer.path / "etc/motd").write_text("tampered")
    with pytest.raises(ImageError, match="has the content of"):
        store.verify_layer(layer.digest)


def test_prune_removes_what_no_reference_names(store: ImageStore) -> None:
    make(store, "a:1", "x", "y")
    kept = make(store, "b:1", "x")
    store.remove("a:1")
    done = store.prune()
    assert (done.images, done.layers) == (1, 1)
    assert store.resolve("b:1").digest == kept.digest
    with pytest.raises(ImageError):
        store.resolve("a:1")


def test_prune_leaves_a_layer_that_is_held(store: ImageStore) -> None:
    image = make(store, "a:1", "x")
    with store.hold(image):
        store.remove("a:1")
        assert store.prune().in_use == 1
        assert (image.layers[0].path / "etc/motd").read_text() == "x"
    assert store.prune().layers == 1


def test_holding_a_pruned_image_is_an_error(store: ImageStore) -> None:
    image = make(store, "a:1", "x")
    store.remove("a:1")
    store.prune()
    with pytest.raises(ImageError, match="gone"):
        store.hold(image)


def test_prune_leaves_what_a_workspace_has_committed(store: ImageStore) -> None:
    with store.workspace() as workspace:
        layer = workspace.commit(tree_with(workspace, "x"))
        store.prune()
        image = store.put("a:1", [layer])
    assert store.resolve("a:1").digest == image.digest


def test_a_hold_ends_with_its_process(store: ImageStore) -> None:
    make(store, "a:1", "x")
    script = f"""
        import os, signal
        from pathlib import Path
        from proctor.sandbox.images import ImageStore
        store = ImageStore(Path({str(store.root)!r}))
        hold = store.hold(store.resolve("a:1"))
        store.remove("a:1")
        assert store.prune().in_use == 1
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.prune().layers == 1


CRASH_POINTS = ["rename", "replace", "mkdir", "fsync", "chmod"]


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_crash_anywhere_leaves_whole_images_and_nothing_after_a_prune(
    store: ImageStore, point: str, nth: int
) -> None:
    before = make(store, "a:1", "x")
    script = f"""
        import os, signal
        from pathlib import Path
        from proctor.sandbox.images import ImageStore
        count = 0
        real = os.{point}
        def die(*args, **kwargs):
            global count
            count += 1
            if count == {nth}:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        os.{point} = die
        store = ImageStore(Path({str(store.root)!r}))
        with store.workspace() as workspace:
            root = workspace.directory("t")
            (root / "file").write_text("new")
            store.put("a:1", [*store.resolve("a:1").layers, workspace.commit(root)])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode in (-signal.SIGKILL, 0)
    after = store.resolve("a:1")
    for layer in after.layers:
        assert layer.digest is not None
        store.verify_layer(layer.digest)
    if after.digest == before.digest:
        assert len(after.layers) == 1
    store.prune()
    assert list((store.root / "tmp").iterdir()) == []
    names = {path.name.removesuffix(".json") for path in (store.root / "layers").iterdir()}
    assert names == {(layer.digest or "")[7:] for layer in after.layers}


def test_list_counts_shared_bytes(store: ImageStore) -> None:
    make(store, "a:1", "xx", "yyy")
    make(store, "b:1", "xx")
    rows = {row.ref: row for row in store.list()}
    assert (rows["a:1"].size_bytes, rows["a:1"].shared_bytes) == (5, 2)
    assert (rows["b:1"].size_bytes, rows["b:1"].shared_bytes) == (2, 2)


def test_removing_a_digest_removes_its_references(store: ImageStore) -> None:
    image = make(store, "a:1", "x")
    store.tag("b:1", "a:1")
    store.remove(image.digest)
    assert store.list() == []


def test_two_processes_may_change_references_at_once(store: ImageStore) -> None:
    make(store, "a:1", "x")
    script = """
        import sys
        from pathlib import Path
        from proctor.sandbox.images import ImageStore
        store = ImageStore(Path(sys.argv[1]))
        for number in range(20):
            store.tag(f"{sys.argv[2]}:{number}", "a:1")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(store.root)]
    running = [subprocess.Popen([*command, name]) for name in ("p", "q")]
    assert [process.wait() for process in running] == [0, 0]
    assert len(store.list()) == 41


def test_the_environment_says_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCTOR_IMAGES", str(tmp_path / "shared"))
    assert ImageStore().root == tmp_path / "shared"
    monkeypatch.delenv("PROCTOR_IMAGES")
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "home"))
    assert ImageStore().root == tmp_path / "home" / "images"
    assert os.path.isabs(ImageStore(Path("relative")).root)


def test_prune_of_all_drops_what_builds_named_themselves(store: ImageStore) -> None:
    make(store, "recipe:0123", "x")
    make(store, "mine:1", "y")
    assert store.prune().images == 0
    assert store.prune(automatic=True).images == 1
    assert [row.ref for row in store.list()] == ["mine:1"]


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    script = f"""
        import os, sys
        from pathlib import Path
        from proctor.sandbox.contract import ImageError
        from proctor.sandbox.images import ImageStore
        os.system("mount -t tmpfs -o size=2m tmpfs {tmp_path}")
        store = ImageStore(Path({str(tmp_path)!r}) / "images")
        def make(ref, size):
            with store.workspace() as workspace:
                root = workspace.directory("t")
                (root / "file").write_bytes(bytes(size))
                return store.put(ref, [workspace.commit(root)])
        before = make("a:1", 1 << 20)
        try:
            make("b:1", 4 << 20)
        except ImageError as error:
            assert "is full" in str(error), error
        else:
            sys.exit("no error")
        store.verify_layer(store.resolve("a:1").layers[0].digest)
        assert [row.ref for row in store.list()] == ["a:1"]
        assert os.listdir(store.root / "tmp") == []
    """
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True)


def test_a_workspace_of_a_dead_process_goes_when_the_next_is_opened(store: ImageStore) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from proctor.sandbox.images import ImageStore
        with ImageStore(Path({str(store.root)!r})).workspace() as workspace:
            (workspace.directory("t") / "file").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert len(list((store.root / "tmp").iterdir())) == 1
    with store.workspace() as mine, store.workspace() as other:
        assert sorted((store.root / "tmp").iterdir()) == sorted([mine.path, other.path])
