"""Reading a task directory: what becomes of each table, and one clear error for each thing that is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.cli.main import main
from proctor.common import ConfigError, RefusedError
from proctor.tasks import load_task, problems
from proctor.tasks.findings import Source
from proctor.tasks.model import AgentLimits, Carry, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeTask = Callable[..., Path]

GOOD_TOML = """\
schema_version = "1.4"

[environment]
network_mode = "no-network"
workdir = "/app"

[agent]
user = "agent"
"""

TESTS_TABLE = """
[proctor]
repo = "/app"

[proctor.tests]
runner = "pytest"
command = "pytest -q"
fail_to_pass = ["test_a.py::test_new"]
pass_to_pass = ["test_a.py::test_old"]
"""


def errors_of(path: Path, **options: Any) -> list[Problem]:
    return [problem for problem in problems(path, **options) if problem.severity == "error"]


# What a good task becomes.


def test_a_good_task_has_no_problem_at_all(make_task: MakeTask) -> None:
    assert problems(make_task()) == []


def test_defaults_are_harbors(make_task: MakeTask) -> None:
    task = load_task(make_task("", name="plain"))
    assert task.name == "plain"
    assert task.verifier.kind == "reward"
    assert task.carry == Carry("filesystem")
    assert task.network.is_none
    assert (task.environment.cpus, task.environment.memory_mb, task.environment.storage_mb) == (1.0, 2048, 10240)
    assert (task.verifier.timeout_s, task.environment.build_timeout_s) == (600.0, 600.0)
    assert task.agent_timeout_s is None
    assert task.agent_limits() == AgentLimits()
    assert task.notes == ("network: none, since the task names no network mode (in Harbor it would be public)",)


def test_every_table_arrives(make_task: MakeTask) -> None:
    toml = """\
version = "1.1"
source = "somewhere"
artifacts = ["/app/out.txt", { source = "/app/logs", destination = "logs", exclude = ["*.tmp"] }]
[task]
name = "org/thing"
authors = [{ name = "A", email = "a@example.org" }]
[metadata]
difficulty = "hard"
category = "files"
repo = "org/repo"
when = 2024-01-02
[agent]
timeout_sec = 900
user = 1000
[verifier]
timeout_sec = 30.5
user = "root"
env = { MODE = "strict" }
[environment]
network_mode = "no-network"
cpus = 2
memory = "4G"
storage = "512M"
build_timeout_sec = 60
env = { A = "1" }
[environment.healthcheck]
command = "true"
retries = 5
[solution.env]
B = "2"
[proctor]
carry = "paths"
carry_paths = ["/app/out.txt"]
capabilities = ["files"]
date = 2026-11-30
[proctor.limits]
steps = 7
total_s = 60
"""
    task = load_task(make_task(toml))
    assert task.name == "org/thing"
    assert task.environment.memory_mb == 4096
    assert task.environment.storage_mb == 512
    assert task.environment.cpus == 2.0
    assert task.environment.env == {"A": "1"}
    assert task.environment.healthcheck is not None
    assert task.environment.healthcheck["retries"] == 5
    assert task.verifier.env == {"MODE": "strict"}
    assert task.verifier.user == "root"
    assert task.agent_user == "1000"
    assert task.solution is not None
    assert task.solution.env == {"B": "2"}
    assert [one["source"] for one in task.artifacts] == ["/app/out.txt", "/app/logs"]
    assert task.artifacts[1]["exclude"] == ["*.tmp"]
    assert task.carry == Carry("paths", paths=("/app/out.txt",))
    assert task.difficulty == "hard"
    assert (task.domain, task.cluster) == ("files", "org/repo")
    assert task.source == "somewhere"
    assert task.date == "2026-11-30"
    assert task.capabilities == ("files",)
    assert (
        json.dumps(task.metadata | {"repo": 0})
        == '{"difficulty": "hard", "category": "files", "repo": 0, "when": "2024-01-02"}'
    )
    assert task.agent_limits() == AgentLimits(total_s=60, steps=7)


def test_domain_and_cluster_of_our_own_table_win(make_task: MakeTask) -> None:
    toml = GOOD_TOML.replace("[agent]", '[metadata]\ncategory = "files"\nrepo = 3\n[agent]')
    task = load_task(make_task(toml))
    assert (task.domain, task.cluster) == ("files", None)
    task = load_task(make_task(toml), overlay={"domain": "data", "cluster": "templates"})
    assert (task.domain, task.cluster) == ("data", "templates")


def test_the_agents_time_limit_is_the_trials_unless_ours_says_otherwise(make_task: MakeTask) -> None:
    task = load_task(make_task(GOOD_TOML + "timeout_sec = 900\n"))
    assert task.agent_limits().total_s == 900
    assert task.agent_limits(AgentLimits(steps=3)).steps == 3


def test_test_groups_inline(make_task: MakeTask) -> None:
    task = load_task(make_task(GOOD_TOML + TESTS_TABLE, {"tests/test.sh": None, "tests/x.py": ""}))
    assert task.verifier.kind == "tests"
    tests = task.verifier.tests
    assert tests is not None
    assert tests.fail_to_pass == ("test_a.py::test_new",)
    assert tests.cwd == "/app"
    assert not tests.truncated_ids
    assert task.carry == Carry("patch", repo="/app")


@pytest.mark.parametrize(
    ("table", "history", "noted"),
    [
        ("", "keep", False),
        ('repo = "/app"\n', "scrub", False),
        ('repo = "/app"\nhistory = "keep"\n', "keep", True),
        ('history = "scrub"\n', "scrub", False),
    ],
)
def test_a_declared_repository_is_scrubbed_and_any_other_may_be_the_task(
    make_task: MakeTask, table: str, history: str, noted: bool
) -> None:
    task = load_task(make_task(GOOD_TOML + "[proctor]\n" + table))
    assert task.history == history
    assert any(note.startswith("history:") for note in task.notes) is noted


def test_test_groups_from_a_file_with_a_patch(make_task: MakeTask) -> None:
    toml = (
        GOOD_TOML
        + """
[proctor]
repo = "/app"
[proctor.tests]
runner = "pytest"
command = "pytest"
groups = "tests/groups.json"
patch = "tests/test.patch"
"""
    )
    patch = "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-x\n+y\n"
    groups = {"fail_to_pass": ["tests/test_a.py::test_cut[(1,"], "pass_to_pass": []}
    files = {"tests/groups.json": json.dumps(groups), "tests/test.patch": patch}
    tests = load_task(make_task(toml, files)).verifier.tests
    assert tests is not None
    assert tests.truncated_ids
    assert tests.protected == ("tests/test_a.py",)


def test_an_image_or_a_recipe_can_be_named(make_task: MakeTask) -> None:
    named = GOOD_TOML + '[proctor]\nimage = "debian:bookworm"\n'
    image = load_task(make_task(named, name="a")).environment
    assert (image.image, image.dockerfile, image.recipe) == ("debian:bookworm", None, None)
    assert image.files is None, "what a Dockerfile copies is not loose"
    loose = load_task(make_task(named, {"environment/Dockerfile": None, "environment/x": "1"}, name="c"))
    assert loose.environment.files == loose.path / "environment"
    files = {"environment/recipe.toml": 'schema = 1\nbase = "debian:bookworm"\n'}
    recipe = load_task(make_task(files=files, name="b")).environment
    assert recipe.recipe == make_task(files=files, name="b") / "environment/recipe.toml"
    assert recipe.dockerfile is None


def test_a_dockerfile_stands_above_a_tag(make_task: MakeTask) -> None:
    toml = GOOD_TOML.replace("workdir", 'docker_image = "org/image:1"\nworkdir')
    task = load_task(make_task(toml, name="a"))
    assert task.environment.dockerfile is not None
    assert task.environment.image is None
    assert any("docker_image org/image:1 is not used" in note for note in task.notes)
    alone = load_task(make_task(toml, {"environment/Dockerfile": None, "environment/data.txt": "1"}, name="b"))
    assert alone.environment.image == "org/image:1"
    assert alone.environment.files == alone.path / "environment"


def test_a_separate_verifier_gets_the_artifacts_only(make_task: MakeTask) -> None:
    toml = 'artifacts = ["/app/out.txt"]\n' + GOOD_TOML + '[verifier]\nenvironment_mode = "separate"\n'
    assert load_task(make_task(toml)).carry == Carry("paths", paths=("/logs/artifacts", "/app/out.txt"))


def test_canary_lines_are_no_part_of_the_instruction(make_task: MakeTask) -> None:
    text = "<!-- canary GUID 1 -->\n# a canary string, do not train\n\n\nDo it.\n\n# canary stays here\n"
    assert load_task(make_task(files={"instruction.md": text})).instruction == "Do it.\n\n# canary stays here\n"


def test_host_variables(make_task: MakeTask) -> None:
    toml = GOOD_TOML + '[environment.env]\nA = "x${HOST_A}y"\nB = "${HOST_B:-two}"\nC = "$PLAIN"\n'
    task = load_task(make_task(toml), host_env={"HOST_A": "1"})
    assert task.environment.env == {"A": "x1y", "B": "two", "C": "$PLAIN"}
    (error,) = errors_of(make_task(toml), host_env={})
    assert (error.line, error.field) == (10, "environment.env.A")
    assert "HOST_A" in error.message


def test_ignored_files_never_reach_a_sandbox(make_task: MakeTask) -> None:
    files = {"tests/.harborignore": "*.secret\n", "tests/a.secret": "x", "tests/keep": "y"}
    root = make_task(files=files)
    folder = load_task(root).verifier.tests_dir
    assert folder is not None
    assert sorted(path.name for path in folder.iterdir()) == ["keep", "test.sh"]
    assert os.access(folder / "test.sh", os.X_OK)
    assert load_task(root).verifier.script == folder / "test.sh"
    assert load_task(root).verifier.tests_dir == folder


def test_a_script_that_is_ignored_is_an_error(make_task: MakeTask) -> None:
    (error,) = errors_of(make_task(files={"tests/.harborignore": "*.sh\n"}))
    assert (error.file, error.message) == ("tests/test.sh", "is left out by tests/.harborignore")


def test_an_overlay_completes_a_task_that_must_stay_unedited(make_task: MakeTask) -> None:
    root = make_task()
    plain, live = load_task(root), load_task(root, overlay={"carry": "live", "limits": {"steps": 3}})
    assert live.carry == Carry("live")
    assert live.limits == {"steps": 3}
    assert plain.digest != live.digest
    assert load_task(root).digest == plain.digest


def test_an_error_in_an_overlay_is_placed_in_its_file(make_task: MakeTask) -> None:
    source = Source(
        "dataset.toml", {("tasks", 0, "proctor"): 4, ("tasks", 0, "proctor", "carry"): 5}, ("tasks", 0, "proctor")
    )
    with pytest.raises(ConfigError, match=r"dataset\.toml:5"):
        load_task(make_task(), overlay={"carry": "everything"}, overlay_source=source)


def test_the_digest_follows_the_content(make_task: MakeTask) -> None:
    root = make_task()
    before = load_task(root).digest
    (root / ".git").mkdir()
    (root / ".git/HEAD").write_text("x")
    assert load_task(root).digest == before
    (root / "tests/test.sh").chmod(0o644)
    assert load_task(root).digest != before


# One clear error for each thing that is wrong: (what is appended or replaced, files, line, field, words).

SPOILED: dict[str, tuple[str, dict[str, str | bytes | None], str, int | None, str | None, str]] = {
    "syntax": ("oops\n", {}, "task.toml", 9, None, "not valid TOML"),
    "unknown-table": ("[enviroment]\nx = 1\n", {}, "task.toml", 9, "enviroment", "unknown key"),
    "unknown-key": ('[verifier]\ntimeout = 1\n', {}, "task.toml", 10, "verifier.timeout", "unknown key"),
    "unknown-proctor-key": ('[proctor]\ncary = "live"\n', {}, "task.toml", 10, "proctor.cary", "unknown key"),
    "unknown-tests-key": (
        TESTS_TABLE.replace("command", "comand"), {}, "task.toml", 15, "proctor.tests.comand", "unknown key"),
    "wrong-type": ('[verifier]\ntimeout_sec = "soon"\n', {}, "task.toml", 10, "verifier.timeout_sec", "a number"),
    "bool-for-number": ("[verifier]\ntimeout_sec = true\n", {}, "task.toml", 10, "verifier.timeout_sec", "number"),
    "infinite-time": ("[verifier]\ntimeout_sec = inf\n", {}, "task.toml", 10, "verifier.timeout_sec", "finite"),
    "negative-time": ("[verifier]\ntimeout_sec = -1\n", {}, "task.toml", 10, "verifier.timeout_sec", "greater"),
    "choice": ('[proctor]\ncarry = "all"\n', {}, "task.toml", 10, "proctor.carry", "'patch'"),
    "paths-without-list": ('[proctor]\ncarry = "paths"\n', {}, "task.toml", 9, "proctor", "carry_paths"),
    "relative-carry": (
        '[proctor]\ncarry = "paths"\ncarry_paths = ["out"]\n', {}, "task.toml", 11,
        "proctor.carry_paths[0]", "absolute"),
    "patch-without-repo": ('[proctor]\ncarry = "patch"\n', {}, "task.toml", 9, "proctor", "repo"),
    "system-without-filesystem": (
        '[proctor]\ncarry = "live"\nsystem = true\n', {}, "task.toml", 9, "proctor", "filesystem"),
    "two-groups": (
        TESTS_TABLE + 'groups = "tests/g.json"\n', {}, "task.toml", 13, "proctor.tests", "groups"),
    "junit-without-path": (
        TESTS_TABLE.replace('"pytest"', '"junit"'), {}, "task.toml", 13, "proctor.tests", "junit_path"),
    "both-groups": (
        TESTS_TABLE.replace("test_old", "test_new"), {}, "task.toml", 13, "proctor.tests", "in both groups"),
    "repeated-test": (
        TESTS_TABLE.replace('"test_a.py::test_old"', '"x", "x"'), {}, "task.toml", 13,
        "proctor.tests", "more than once"),
    "no-test": (
        TESTS_TABLE.replace('"test_a.py::test_old"', "").replace('"test_a.py::test_new"', ""),
        {}, "task.toml", 13, "proctor.tests", "no test at all"),
    "groups-file-missing": (
        '[proctor.tests]\nrunner = "pytest"\ncommand = "x"\ngroups = "tests/no.json"\n',
        {}, "task.toml", 12, "proctor.tests.groups", "does not exist"),
    "groups-file-outside": (
        '[proctor.tests]\nrunner = "pytest"\ncommand = "x"\ngroups = "groups.json"\n',
        {"groups.json": "{}"}, "task.toml", 12, "proctor.tests.groups", "not in tests/"),
    "groups-file-escapes": (
        '[proctor.tests]\nrunner = "pytest"\ncommand = "x"\ngroups = "tests/../../x"\n',
        {}, "task.toml", 12, "proctor.tests.groups", "without `..`"),
    "groups-file-not-json": (
        '[proctor.tests]\nrunner = "pytest"\ncommand = "x"\ngroups = "tests/g.json"\n',
        {"tests/g.json": "{\n oops"}, "tests/g.json", 2, None, "not valid JSON"),
    "groups-file-wrong": (
        '[proctor.tests]\nrunner = "pytest"\ncommand = "x"\ngroups = "tests/g.json"\n',
        {"tests/g.json": '{"fail_to_pass": "a", "pass_to_pass": []}'}, "tests/g.json", None, None, "fail_to_pass"),
    "bad-date": ('[proctor]\ndate = "yesterday"\n', {}, "task.toml", 10, "proctor.date", "date"),
    "bad-limit": ("[proctor.limits]\nsteps = 0\n", {}, "task.toml", 10, "proctor.limits.steps", "greater"),
    "bad-env-name": ('[environment.env]\n"A B" = "1"\n', {}, "task.toml", 9, "environment.env", "environment variable"),
    "env-not-text": ("[environment.env]\nA = 1\n", {}, "task.toml", 10, "environment.env.A", "string"),
    "artifact-escapes": (
        '[[artifacts]]\nsource = "/app/../x"\n', {}, "task.toml", 10, "artifacts[0].source", "no `..`"),
    "recipe-missing": ('[proctor]\nimage = "no.toml"\n', {}, "task.toml", 10, "proctor.image", "does not exist"),
    "bad-name": ('[task]\nname = "../x"\n', {}, "task.toml", 10, "task.name", "pattern"),
    "no-instruction": ("", {"instruction.md": None}, "instruction.md", None, None, "is missing"),
    "empty-instruction": ("", {"instruction.md": "# canary\n \n"}, "instruction.md", None, None, "is empty"),
    "instruction-not-text": ("", {"instruction.md": b"a\n\xff\n"}, "instruction.md", 2, None, "UTF-8"),
    "no-tests": ("", {"tests/test.sh": None}, "tests/test.sh", None, None, "is missing"),
    "no-environment": ("", {"environment/Dockerfile": None}, "environment/", None, None, "no Dockerfile"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_one_clear_error(make_task: MakeTask, name: str) -> None:
    extra, files, file, line, field, words = SPOILED[name]
    (error,) = errors_of(make_task(GOOD_TOML + extra, files))
    assert (error.file, error.line, error.field) == (file, line, field)
    assert words in error.message
    assert error.rule != "refused"
    with pytest.raises(ConfigError) as caught:
        load_task(make_task(GOOD_TOML + extra, files))
    assert "\n" not in str(caught.value)


REFUSED: dict[str, tuple[str, dict[str, str | bytes | None], str]] = {
    "steps": ("[[steps]]\nname = 'a'\n", {"instruction.md": None, "tests/test.sh": None}, "several steps"),
    "steps-folder": ("", {"steps/a/instruction.md": "x"}, "several steps"),
    "compose": ("", {"environment/docker-compose.yaml": ""}, "compose file"),
    "verifier-image": ("", {"tests/Dockerfile": ""}, "image of the verifier's own"),
    "verifier-environment": ("[verifier.environment]\ncpus = 1\n", {}, "environment of the verifier's own"),
    "gpu": ("[environment]\ngpus = 1\n", {}, "a GPU"),
    "tpu": ("[environment]\ntpu = { type = 'v4', topology = '2x2' }\n", {}, "a TPU"),
    "mcp": ("[[environment.mcp_servers]]\nname = 'a'\nurl = 'http://x'\n", {}, "MCP server"),
    "windows": ("[environment]\nos = 'windows'\n", {}, "Windows"),
    "windows-script": ("", {"tests/test.sh": None, "tests/test.bat": ""}, "Windows script"),
    "skills": ("[environment]\nskills_dir = '/s'\n", {}, "skills directory"),
    "collect": ("[[verifier.collect]]\ncommand = 'x'\n", {}, "collect command"),
    "service": ("[[artifacts]]\nsource = '/a'\nservice = 'db'\n", {}, "service 'db'"),
    "trajectory": ("", {"trajectory.json": "{}"}, "trajectory"),
    "public": ("[environment]\nnetwork_mode = 'public'\n", {}, "network 'public'"),
    "allowlist": ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a']\n", {}, "network 'allowlist'"),
    "allow-internet": ("[environment]\nallow_internet = true\n", {}, "network 'public'"),
    "allowed-hosts": ("[verifier]\nallowed_hosts = ['a']\n", {}, "network 'allowlist'"),
    "strategy": ("multi_step_reward_strategy = 'mean'\n", {}, "several steps"),
    "agent-network": ("[agent]\nnetwork_mode = 'public'\n", {}, "network 'public'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(make_task: MakeTask, name: str) -> None:
    toml, files, words = REFUSED[name]
    root = make_task(toml, files)
    (error,) = errors_of(root)
    assert words in error.message
    assert error.rule == "refused"
    with pytest.raises(RefusedError):
        load_task(root)


@pytest.mark.parametrize("toml", ["network_mode = 'public'", "allow_internet = true"])
def test_a_network_can_be_taken_away_by_name(make_task: MakeTask, toml: str) -> None:
    root = make_task(f"[environment]\n{toml}\n")
    task = load_task(root, overlay={"network": "none"}, network=True)
    assert task.network.is_none
    assert task.notes == ("network: none, forced; the task asks for public",)


@pytest.mark.parametrize(
    ("toml", "agent", "verifier"),
    [
        ("", "public", "public"),
        ("[environment]\nnetwork_mode = 'no-network'\n", "none", "none"),
        ("[environment]\nallow_internet = false\n", "none", "none"),
        ("[environment]\nallowed_hosts = ['a.test']\n", "allowlist", "allowlist"),
        ("[environment]\nnetwork_mode = 'public'\n[verifier]\nnetwork_mode = 'no-network'\n", "public", "none"),
        ("[environment]\nnetwork_mode = 'no-network'\n[agent]\nallowed_hosts = ['*.b.test']\n", "allowlist", "none"),
    ],
)
def test_a_run_that_allows_networks_gives_each_phase_what_it_asks_for(
    make_task: MakeTask, toml: str, agent: str, verifier: str
) -> None:
    task = load_task(make_task(toml), network=True)
    assert (task.network.agent.mode, task.network.verifier.mode) == (agent, verifier)
    if not task.network.is_none:
        assert f"network: agent {agent}, verifier {verifier}" in task.notes[0]


def test_a_host_that_is_none_is_an_error_when_it_would_count(make_task: MakeTask) -> None:
    root = make_task("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['10.0.0.1']\n")
    with pytest.raises(ConfigError, match=r"allowed_hosts\[0\].*10\.0\.0\.1"):
        load_task(root, network=True)


def test_all_problems_are_collected(make_task: MakeTask) -> None:
    toml = GOOD_TOML + "gpus = 1\n[verifier]\ntimeout_sec = 0\nbogus = 1\n"
    found = errors_of(make_task(toml))
    assert {(problem.line, problem.field) for problem in found} == {
        (9, "agent.gpus"),
        (11, "verifier.timeout_sec"),
        (12, "verifier.bogus"),
    }
    with pytest.raises(ConfigError, match="and 2 more"):
        load_task(make_task(toml))


def test_a_misspelt_key_is_answered_with_the_right_one(make_task: MakeTask) -> None:
    (error,) = errors_of(make_task(GOOD_TOML + "[proctor]\ncary = 'live'\n"))
    assert error.remedy == "did you mean `carry`?"


def test_sizes(make_task: MakeTask) -> None:
    (error,) = errors_of(make_task("[environment]\nmemory = 'much'\n"))
    assert (error.line, error.field) == (2, "environment.memory")
    (error,) = errors_of(make_task("[environment]\nmemory = '1G'\nmemory_mb = 5\n"))
    assert "both" in error.message


def test_both_version_keys_are_one_too_many(make_task: MakeTask) -> None:
    (error,) = errors_of(make_task("schema_version = '1.4'\nversion = '1.0'\n[environment]\n"))
    assert (error.line, error.field) == (2, "version")


@pytest.mark.parametrize("version", ["1.5", "2.0", "0.9", "new"])
def test_a_schema_that_is_not_known(make_task: MakeTask, version: str) -> None:
    (error,) = errors_of(make_task(f"schema_version = '{version}'\n"))
    assert error.field == "schema_version"


def test_links_that_leave_the_directory(make_task: MakeTask) -> None:
    root = make_task()
    (root / "tests/inside").symlink_to("../solution/solve.sh")
    assert errors_of(root) == []
    (root / "tests/outside").symlink_to("/etc/passwd")
    (error,) = errors_of(root)
    assert error.file == "tests/outside"


def test_what_is_no_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a task directory"):
        load_task(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_task(tmp_path / "nowhere")


def test_a_missing_solution_is_a_warning(make_task: MakeTask) -> None:
    root = make_task(files={"solution/solve.sh": None})
    (warning,) = problems(root)
    assert (warning.severity, warning.rule) == ("warning", "no-solution")
    assert load_task(root).solution is None


# Whatever is in the file, the answer is a list of problems.

WORDS = st.sampled_from(
    ["", "\n", "=", "[", "]", "[[", "]]", "{", "}", '"', "'", '"""', ",", ".", "-1", "0", "nan", "true", "[]", "{}",
     "1979-05-27", '"x"', "proctor", "tests", "environment", "carry", '"live"', "steps", "env", "artifacts", "\x00"]
)  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 12), WORDS), min_size=1, max_size=4))
def test_no_file_breaks_the_reader(make_task: MakeTask, cuts: list[tuple[int, int, str]]) -> None:
    text = GOOD_TOML + TESTS_TABLE
    for at, length, word in cuts:
        text = text[:at] + word + text[at + length :]
    for problem in problems(make_task(text, {"tests/x.py": ""})):
        assert problem.message
        assert problem.line is None or 1 <= problem.line <= text.count("\n") + 1


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_break_the_reader(make_task: MakeTask, data: bytes) -> None:
    assert isinstance(problems(make_task(files={"task.toml": data})), list)


def test_file_names_and_ignore_files_need_not_be_text(make_task: MakeTask, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_task(files={"tests/.harborignore": b"\xff*\n"})
    odd = os.fsencode(root / "tests") + b"/\xfe"
    os.symlink("/nowhere", odd)
    Path(os.fsdecode(os.fsencode(root / "tests") + b"/\xffgone")).write_text("x")
    (error,) = errors_of(root)
    assert error.message == "is a link that leaves the task directory"
    assert main(["task", "check", str(root)]) == 4
    assert "tests/\\udcfe" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_a_problem(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_task()

    def denied(path: Path, *_: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    (error,) = errors_of(root)
    assert (error.file, error.message) == (str(root / "task.toml"), "cannot read the task: Permission denied")


def test_a_link_that_leaves_through_another_link(make_task: MakeTask) -> None:
    """By its words `deep/up/../../x` stays inside; `deep/up` leads to the root itself, and `..` from there does not."""
    root = make_task()
    (root.parent / "outside").write_text("secret")
    (root / "deep").mkdir()
    (root / "deep/up").symlink_to("..")
    (root / "instruction.md").unlink()
    (root / "instruction.md").symlink_to("deep/up/../outside")
    assert (root / "instruction.md").read_text() == "secret"
    assert [error.message for error in errors_of(root)] == ["is a link that leaves the task directory"]


def test_a_file_that_takes_hours_to_read(make_task: MakeTask) -> None:
    root = make_task()
    with (root / "tests/huge").open("wb") as file:
        file.truncate(1 << 40)
    (error,) = errors_of(root)
    assert error.message == "is larger than 16 GiB"
