"""Recipes: read strictly; each step a layer; built in a sandbox; cached; with a Git repository that hides nothing."""

from __future__ import annotations

import hashlib
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest

from proctor import sandbox
from proctor.common import ConfigError
from proctor.sandbox.contract import Image, ImageError, SandboxSpec
from proctor.sandbox.images import ImageStore, build_recipe, ensure_image, load_recipe, parse_recipe
from proctor.sandbox.images.debian import parse_apt

if TYPE_CHECKING:
    from pathlib import Path

BASE = "debian:bookworm"


# The format.


def recipe(text: str) -> dict[str, object]:
    return tomllib.loads(text)


WRONG = {
    "no schema": ('base = "x"', "schema"),
    "other schema": ('schema = 2\nbase = "x"', "schema"),
    "neither base nor python": ("schema = 1", "base, python, or both"),
    "unknown key": ('schema = 1\nbase = "x"\nimage = "y"', "image"),
    "bad python": ('schema = 1\npython = "three"', "python"),
    "relative workdir": ('schema = 1\nbase = "x"\nworkdir = "app"', "workdir"),
    "empty step": ('schema = 1\nbase = "x"\n[[step]]', "exactly one"),
    "two in one step": ('schema = 1\nbase = "x"\n[[step]]\nrun = "a"\ngit = { path = "/a" }', "exactly one"),
    "cwd without run": ('schema = 1\nbase = "x"\n[[step]]\ngit = { path = "/a" }\ncwd = "/"', "belong to run"),
    "copy climbs": ('schema = 1\nbase = "x"\n[[step]]\ncopy = { from = "../x", to = "/a" }', "does not stay below"),
    "copy absolute": ('schema = 1\nbase = "x"\n[[step]]\ncopy = { from = "/etc/passwd", to = "/a" }', "does not stay"),
    "copy from image climbs": (
        'schema = 1\nbase = "x"\n[[step]]\ncopy = { image = "y", from = "/../etc", to = "/a" }',
        "climbs",
    ),
    "unpack without digest": ('schema = 1\nbase = "x"\n[[step]]\nunpack = { archive = "a", to = "/a" }', "sha256"),
    "write with odd mode": (
        'schema = 1\nbase = "x"\n[[step]]\nwrite = { path = "/a", text = "", mode = "rwx" }',
        "mode",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_recipe_is_refused_by_name(case: str) -> None:
    text, words = WRONG[case]
    with pytest.raises(ConfigError, match=words):
        parse_recipe(recipe(text), name="recipe.toml")


def test_a_recipe_that_is_not_toml(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("= 1")
    with pytest.raises(ConfigError, match="not a TOML file"):
        load_recipe(tmp_path / "recipe.toml")


def test_the_machine_s_mirrors_serve_other_releases() -> None:
    targets = (
        "http://mirror.test/debian/|bookworm|main\nhttp://mirror.test/debian/|bookworm-updates|main\n"
        "http://mirror.test/security/|bookworm-security|main\nhttp://other.test/node|nodistro|main\n"
    )
    settings = parse_apt(targets, 'Acquire::http::Proxy "http://p";\nDir "/";\n')
    assert settings.options == ('Acquire::http::Proxy "http://p";',)
    assert settings.sources("trixie") == (
        "deb http://mirror.test/debian/ trixie main\ndeb http://mirror.test/debian/ trixie-updates main\n"
        "deb http://mirror.test/security/ trixie-security main\n"
    )


def test_a_machine_without_debian_mirrors_leaves_the_choice_to_mmdebstrap() -> None:
    assert parse_apt("http://mirror.test/ubuntu/|noble|main\n", "").sources("bookworm") is None


def test_a_password_in_the_sources_does_not_get_into_an_image() -> None:
    with pytest.raises(Exception, match="password"):
        parse_apt("https://me:secret@mirror.test/debian/|bookworm|main\n", "")


# Builds.

builds = [pytest.mark.sandbox, pytest.mark.images, pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture(scope="module")
async def base_store() -> ImageStore:
    """The machine's own store, which keeps the Debian base between test runs."""
    store = ImageStore()
    await ensure_image(BASE, store=store)
    return store


@pytest.fixture
async def store(base_store: ImageStore, tmp_path: Path) -> ImageStore:
    """A store of the test's own, with a copy of the Debian base in it."""
    own = ImageStore(tmp_path / "images")
    image = base_store.resolve(BASE)
    with own.workspace() as workspace:
        copy = workspace.directory("base")
        # Hard links: the layer is read-only for everybody, and a copy of 300 MB for each test is not needed.
        subprocess.run(["cp", "--archive", "--link", f"{image.layers[0].path}/.", str(copy)], check=True)  # noqa: ASYNC221
        layer = workspace.commit(copy)
        own.put(BASE, [layer], env=image.env, labels=image.labels)
    return own


def write(tmp_path: Path, text: str, **files: bytes) -> Path:
    folder = tmp_path / "recipe"
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(f'schema = 1\nbase = "{BASE}"\n{text}')
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder / "recipe.toml"


async def run(image: Image, command: str, **options: str) -> str:
    async with sandbox.create(SandboxSpec(image=image)) as box:
        result = await box.exec(command, **options)  # type: ignore[arg-type]
        assert result.ok, result.error_text
        return result.text


class Lines:
    """Remembers which steps were worked on."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, step: int, total: int, text: str) -> None:
        self.texts.append(text)


class TestBuilds:
    pytestmark = builds

    async def test_every_kind_of_step(self, store: ImageStore, tmp_path: Path) -> None:
        source = tmp_path / "src"
        (source / "pkg").mkdir(parents=True)
        (source / "pkg/a.py").write_text("print('a')\n")
        subprocess.run(["tar", "-C", source, "-czf", tmp_path / "src.tgz", "."], check=True)  # noqa: ASYNC221
        data = (tmp_path / "src.tgz").read_bytes()
        path = write(
            tmp_path,
            f"""
            workdir = "/app"
            env = {{ GREETING = "hello" }}
            [[step]]
            unpack = {{ archive = "src.tgz", sha256 = "{hashlib.sha256(data).hexdigest()}", to = "/app" }}
            [[step]]
            copy = {{ from = "notes.txt", to = "/app/pkg/" }}
            [[step]]
            write = {{ path = "/usr/local/bin/hi", text = "#!/bin/sh\\necho $GREETING\\n", mode = "0755" }}
            [[step]]
            run = "hi > greeting && rm -rf /usr/share/doc/git"
            """.replace("            ", ""),
            src__tgz=data,
            notes__txt=b"n",
        )
        image = await build_recipe(path, store=store, ref="test:1")
        assert len(image.layers) == 5
        found = await run(image, "pwd; cat greeting pkg/a.py pkg/notes.txt; ls -d /usr/share/doc/git || true; hi")
        assert found.split("\n") == ["/app", "hello", "print('a')", "nhello", ""]

    async def test_nothing_of_the_build_stays_in_the_image(self, store: ImageStore, tmp_path: Path) -> None:
        path = write(
            tmp_path, '[[step]]\nrun = "test -s /etc/resolv.conf && test -n \\"$SSL_CERT_FILE\\" && echo 1 > /x"'
        )
        image = await build_recipe(path, store=store)
        layer = image.layers[-1].path
        assert [item.name for item in layer.iterdir()] == ["x"]
        assert "SSL_CERT_FILE" not in image.env

    async def test_steps_are_found_again_and_later_ones_built_anew(self, store: ImageStore, tmp_path: Path) -> None:
        steps = '[[step]]\nrun = "date +%N > /once"\n[[step]]\nrun = "echo {} > /second"\n'
        first = await build_recipe(write(tmp_path, steps.format(1)), store=store)
        again = await build_recipe(write(tmp_path, steps.format(1)), store=store)
        other = await build_recipe(write(tmp_path, steps.format(2)), store=store)
        assert again.digest == first.digest
        assert other.layers[:-1] == first.layers[:-1]
        assert other.layers[-1] != first.layers[-1]

    async def test_a_copied_file_that_changes_is_copied_again(self, store: ImageStore, tmp_path: Path) -> None:
        step = '[[step]]\ncopy = { from = "f", to = "/f" }'
        first = await build_recipe(write(tmp_path, step, f=b"1"), store=store)
        second = await build_recipe(write(tmp_path, step, f=b"2"), store=store)
        assert first.layers[-1] != second.layers[-1]

    async def test_a_step_that_fails_shows_its_last_lines(self, store: ImageStore, tmp_path: Path) -> None:
        path = write(tmp_path, '[[step]]\nrun = "echo before; echo the-reason >&2; exit 7"')
        with pytest.raises(ImageError, match=r"step 1 .*exit code 7.*the-reason") as caught:
            await build_recipe(path, store=store, ref="test:1")
        assert "\n" not in str(caught.value)
        assert store.find_digest("test:1") is None

    async def test_a_failed_build_goes_on_where_it_stopped(self, store: ImageStore, tmp_path: Path) -> None:
        steps = '[[step]]\nrun = "date +%N > /once"\n[[step]]\nrun = "{}"\n'
        with pytest.raises(ImageError):
            await build_recipe(write(tmp_path, steps.format("exit 1")), store=store)
        lines = Lines()
        await build_recipe(write(tmp_path, steps.format("echo now; touch /done")), store=store, progress=lines)
        assert "now" in lines.texts

    async def test_an_archive_with_another_digest_is_refused(self, store: ImageStore, tmp_path: Path) -> None:
        step = f'[[step]]\nunpack = {{ archive = "a", sha256 = "{"0" * 64}", to = "/a" }}'
        with pytest.raises(ConfigError, match="has sha256"):
            await build_recipe(write(tmp_path, step, a=b"x"), store=store)

    async def test_a_build_step_cannot_reach_the_machine(self, store: ImageStore, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        marker.write_text("secret")
        command = f"for p in /proc/*/root; do cat $p{marker} && exit 1; done; mount -t tmpfs t /mnt && exit 1; true"
        await build_recipe(write(tmp_path, f'[[step]]\nrun = "{command}"'), store=store)

    async def test_a_repository_has_one_commit_and_no_other_object(self, store: ImageStore, tmp_path: Path) -> None:
        steps = """
            [[step]]
            run = "mkdir -p /r/sub && cd /r && echo 1 > a && echo '*.log' > .gitignore && echo 2 > kept.log"
            [[step]]
            git = { path = "/r", message = "start" }
            """.replace("            ", "")
        image = await build_recipe(write(tmp_path, steps), store=store)
        script = """cd /r && git rev-list --all --count && git log -1 --format=%an,%ad,%s --date=iso
            git ls-files | tr '\\n' ' '; git fsck --unreachable --no-reflogs 2>/dev/null
            git status --porcelain; git reflog | wc -l"""
        text = await run(image, script)
        assert text.split("\n")[:3] == ["1", "proctor,2000-01-01 00:00:00 +0000,start", ".gitignore a kept.log 0"]

    async def test_the_same_files_give_the_same_commit(self, store: ImageStore, tmp_path: Path) -> None:
        steps = '[[step]]\nrun = "mkdir /r && echo 1 > /r/a; echo {} > /other"\n[[step]]\ngit = {{ path = "/r" }}'
        commits = set()
        for number in (1, 2):
            image = await build_recipe(write(tmp_path, steps.format(number)), store=store)
            commits.add(await run(image, "git -C /r rev-parse HEAD"))
        assert len(commits) == 1

    async def test_a_repository_that_is_there_is_not_touched(self, store: ImageStore, tmp_path: Path) -> None:
        steps = '[[step]]\nrun = "git init -q /r"\n[[step]]\ngit = { path = "/r" }'
        with pytest.raises(ImageError, match="there is a repository already"):
            await build_recipe(write(tmp_path, steps), store=store)

    async def test_a_link_in_the_base_is_not_covered_by_a_directory(self, store: ImageStore, tmp_path: Path) -> None:
        path = write(tmp_path, '[[step]]\nwrite = { path = "/bin/mine", text = "x" }')
        image = await build_recipe(path, store=store)
        assert await run(image, "readlink /bin; cat /usr/bin/mine") == "usr/bin\nx"

    async def test_variables_for_run_time_do_not_hold_while_building(self, store: ImageStore, tmp_path: Path) -> None:
        path = write(tmp_path, 'run_env = { OFFLINE = "1" }\n[[step]]\nrun = "test -z \\"$OFFLINE\\""')
        image = await build_recipe(path, store=store, ref="test:1")
        assert image.env["OFFLINE"] == "1"
        above = tmp_path / "above.toml"
        above.write_text('schema = 1\nbase = "test:1"\n[[step]]\nrun = "test -z \\"$OFFLINE\\""')
        assert (await build_recipe(above, store=store)).env["OFFLINE"] == "1"

    async def test_the_host_image_cannot_be_built_upon(self, store: ImageStore, tmp_path: Path) -> None:
        path = tmp_path / "r.toml"
        path.write_text('schema = 1\nbase = "host"')
        with pytest.raises(ConfigError, match="cannot be built upon"):
            await build_recipe(path, store=store)
