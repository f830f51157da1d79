"""Recipes: the file, what it injects, and an agent made of nothing but data, from the command line to the record."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agents.programs import ROOT, proctor, write_caller

from proctor.agents import InstalledHarness, StopReason, load_harness, run_harness
from proctor.agents.recipe import PLACEHOLDERS, RECIPES, check_values, fill, load_recipe, recipe_names
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from pathlib import Path

SHELL_AGENT = """
version = 1
name = "shell-agent"
agent_version = "3"
command = ["sh", "${state}/agent.sh", "${workdir}"]
stdin = "${instruction}"

[environment]
GREETING = "hello"
NOTES = "${state}/memory/notes.txt"

[[files]]
path = "${state}/agent.sh"
source = "agent.sh"

[probe]
command = ["sh", "-c", "echo shell-agent 3"]
expect = "shell-agent 3"

[transcript]
format = "claude"
path = "stdout"

[[logs]]
path = "${state}/logs"
name = "logs"

[memory]
path = "${state}/memory"
"""
SCRIPT = r"""
cd "$1" && cat > asked.txt && echo "$GREETING" > hello.txt
mkdir -p "$(dirname "$0")/logs" && echo "started" > "$(dirname "$0")/logs/agent.log"
[ -e "$NOTES" ] && cat "$NOTES" > remembered.txt
call='{"type":"tool_use","id":"t1","name":"Bash","input":{"command":"echo"}}'
echo '{"type":"assistant","message":{"id":"m1","model":"none","content":['"$call"']}}'
echo '{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t1","content":"hello"}]}}'
echo 'not json'
echo '{"type":"result","result":"all done"}'
exit "${END:-0}"
"""


def write(folder: Path, text: str = SHELL_AGENT, script: str = SCRIPT) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "agent.toml").write_text(text)
    (folder / "agent.sh").write_text(script)
    return folder / "agent.toml"


@pytest.mark.parametrize("name", recipe_names())
def test_the_packaged_recipes_are_pinned_and_say_nothing_they_do_not_mean(name: str) -> None:
    harness = load_harness(name)
    assert isinstance(harness, InstalledHarness)
    assert harness.name == name
    assert harness.protocols
    recipe = load_recipe(RECIPES / name / "agent.toml").recipe
    assert recipe.probe is not None
    assert recipe.transcript.format != "none"
    assert recipe.toolkit is not None
    lock = (RECIPES / name / recipe.toolkit.lock).read_text()
    if recipe.toolkit.kind == "npm":
        packages = {place: entry for place, entry in json.loads(lock)["packages"].items() if place}
        assert packages
        assert all(entry["integrity"].startswith("sha512-") and "resolved" not in entry for entry in packages.values())
        assert any(entry["version"].startswith(harness.version) for entry in packages.values())
    else:
        pinned = [line for line in lock.splitlines() if line and not line.startswith((" ", "#"))]
        assert f"{name}=={harness.version} \\" in pinned
        assert lock.count("--hash=sha256:") >= len(pinned)
    # Every file that lies in the folder is part of what is digested.
    assert {path.name for path in (RECIPES / name).iterdir()} == set(harness.loaded.contents)  # type: ignore[attr-defined]


BAD = {
    "wat = 1": "wat",
    "command = []": "command",
    'environment = {"A B" = "x"}': "not the name of a variable",
    'environment = {A = "${instruction}"}': "environment.A",
    'stdin = "${nonsense}"': "${nonsense} is not known",
    'command = ["${toolkit}/x"]': "no [toolkit]",
    'command = ["x", "${token}"]': "protocols is empty",
    'files = [{path = "etc/x", text = ""}]': "not an absolute path",
    'files = [{path = "/a/../b", text = ""}]': "not an absolute path",
    'files = [{path = "/a"}]': "exactly one of source and text",
    'files = [{path = "/a", source = "../agent.sh"}]': "does not stay in the recipe's directory",
    'files = [{path = "/a", source = "missing.txt"}]': "files.0.source",
    'probe = {command = ["x"], expect = "("}': "not a regular expression",
    'transcript = {format = "morse"}': "transcript.format",
    'toolkit = {kind = "pip", lock = "none.txt"}': "toolkit.lock",
    'protocols = ["telepathy"]': "protocols.0",
    'agent_version = ""': "agent_version",
    "version = 2": "version",
}


@pytest.mark.parametrize(("line", "named"), BAD.items())
def test_a_wrong_recipe_is_one_line_that_names_the_field(line: str, named: str, tmp_path: Path) -> None:
    key = line.partition(" ")[0]
    base = {"version": "version = 1", "name": 'name = "x"', "agent_version": 'agent_version = "1"'}
    base |= {"command": 'command = ["true"]', key: line}
    path = write(tmp_path, "\n".join(base.values()))
    with pytest.raises(ConfigError) as caught:
        load_harness(str(path))
    assert named in caught.value.line()
    assert "\n" not in caught.value.line()
    assert str(path) in caught.value.line()


_VALUES = st.fixed_dictionaries({name: st.text(max_size=20) for name in PLACEHOLDERS})


_PIECES = st.sampled_from([f"${{{n}}}" for n in PLACEHOLDERS]) | st.sampled_from(["$${", "$a"]) | st.text("ab}\\ ")


@given(pieces=st.lists(_PIECES, max_size=6), values=_VALUES)
def test_placeholders_are_replaced_once_whatever_values_hold(pieces: list[str], values: dict[str, Any]) -> None:
    expected = "".join("${" if p == "$${" else values[p[2:-1]] if p.startswith("${") else p for p in pieces)
    text = "".join(pieces)
    assert fill(text, values) == expected


def test_values_cannot_break_out_of_a_string_in_a_configuration_file() -> None:
    check_values({"model": "small-1", "instruction": 'say "hi"\n'})
    for bad in ('a"b', "a\\b", "a\nb", "a\x00b"):
        with pytest.raises(ConfigError, match="model"):
            check_values({"model": bad})


def test_every_byte_that_is_injected_changes_the_digest(tmp_path: Path) -> None:
    def digests(**changes: str) -> tuple[str, dict[str, str]]:
        loaded = load_recipe(write(tmp_path / "r", **changes))
        return loaded.digest, loaded.digests

    first, parts = digests()
    assert digests()[0] == first
    assert set(parts) == {"agent.toml", "agent.sh"}
    assert digests(script=SCRIPT + " ")[0] != first
    assert digests(text=SHELL_AGENT.replace('GREETING = "hello"', 'GREETING = "hullo"'))[0] != first


@pytest.mark.sandbox
@pytest.mark.slow
def test_an_agent_that_is_data_from_the_command_line_to_the_record(tmp_path: Path) -> None:
    recipe = write(tmp_path / "agent")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/notes.txt").write_text("the answer is 42\n")
    record = tmp_path / "record"
    done = proctor(
        "run", "examples/demo", "--task", "merge-orders", "--agent", f"fresh={recipe}", "--agent", f"old={recipe}",
        "--option", f"old.memory={tmp_path / 'notes'}", "-o", str(record), home=tmp_path / "home",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lock = json.loads((record / "run.json").read_text())
    for agent in lock["agents"]:
        assert agent["harness"]["name"] == "shell-agent"
        assert agent["harness"]["version"] == "3"
        assert set(agent["harness"]["injected"]) == {"recipe/agent.toml", "recipe/agent.sh"}
    by_label = {agent["label"]: agent for agent in lock["agents"]}
    assert list(by_label["old"]["option_digests"]) == [str(tmp_path / "notes")]
    trials = {path.name.split("@")[1]: path for path in (record / "trials").iterdir()}
    for label, trial in trials.items():
        trajectory = json.loads((trial / "trajectory.json").read_text())
        steps = trajectory["steps"]
        assert [step["source"] for step in steps] == ["system", "user", "agent"]
        assert steps[0]["extra"]["probed"] == "shell-agent 3"
        assert steps[0]["extra"]["memory"]["from"] == ("empty" if label == "fresh" else str(tmp_path / "notes"))
        assert steps[2]["extra"]["told_by"] == "agent"
        assert steps[2]["tool_calls"][0]["function_name"] == "Bash"
        assert steps[2]["observation"]["results"][0]["content"] == "hello"
        assert json.loads((trial / "result.json").read_text())["final_message"] == "all done"
        assert (trial / "agent/logs_agent.log").read_text() == "started\n"
        assert "line 3 is not a JSON object" in (trial / "logs/harness.log").read_text()
        changed = {entry["path"] for entry in json.loads((trial / "diff.json").read_text())["entries"]}
        assert {path for path in changed if "proctor" in path} == set()
        assert any(path.endswith("/asked.txt") for path in changed)
        assert any(path.endswith("/remembered.txt") for path in changed) == (label == "old")
    again = proctor("run", "--resume", str(record), home=tmp_path / "home")
    assert again.returncode == 0, again.stderr
    write(tmp_path / "agent", script=SCRIPT + "\n# changed\n")
    changed_since = proctor("run", "--resume", str(record), home=tmp_path / "home")
    assert changed_since.returncode == 4
    assert "injected.recipe/agent.sh" in changed_since.stderr


@pytest.mark.anyio
async def test_the_end_of_the_program_is_the_end_of_the_trial(
    tmp_path: Path, box: Any, task: Any, recorder: Any, limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from proctor.agents import command_line

    monkeypatch.setattr(command_line, "STATE", str(tmp_path / "state"))

    async def play(**changes: str) -> Any:
        recorder.steps.clear()
        harness = load_harness(str(write(tmp_path / "r", **changes)))
        return await run_harness(harness, sandbox=box, task=task, recorder=recorder, limits=limits)

    result = await play()
    assert (result.stop, result.final_message) == (StopReason.FINISHED, "all done")
    assert not (tmp_path / "state").exists()
    result = await play(script="echo broken >&2; exit 3")
    assert result.stop is StopReason.ERROR
    assert result.detail == "shell-agent ended with exit code 3: broken"
    # Without a usable transcript the command itself is the one step.
    assert recorder.agent_steps[0].tool_calls[0].name == "run"
    assert "exit code: 3" in recorder.agent_steps[0].tool_calls[0].result
    with pytest.raises(RefusedError, match="shell-agent 3"):
        await play(text=SHELL_AGENT.replace('expect = "shell-agent 3"', 'expect = "shell-agent 4"'))
    assert not (tmp_path / "state").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/old").touch()
    with pytest.raises(RefusedError, match="memory would not be empty"):
        await play(text=SHELL_AGENT.replace('${state}/memory"\n', f'{tmp_path}/full"\n'))


GATEWAY = """
version = 1
[upstreams.local]
base_url = "http://127.0.0.1:9/v1"
protocols = ["chat"]
[models.small]
upstream = "local"
id = "small"
"""


def test_an_agent_that_does_not_speak_what_the_upstream_speaks_is_refused_before_anything_is_built(
    tmp_path: Path,
) -> None:
    gateway = tmp_path / "gateway.toml"
    gateway.write_text(GATEWAY)
    for agent, code in {"codex": 5, "claude-code": 5}.items():
        done = proctor(
            "run", "examples/demo", "--agent", agent, "--gateway", str(gateway), "-o", str(tmp_path / "r"),
            home=tmp_path / "home",
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert f"{agent} speaks" in done.stderr
        assert not (tmp_path / "r").exists()


def test_the_example_in_the_guide_is_a_recipe(tmp_path: Path) -> None:
    text = (ROOT / "docs/agents.md").read_text()
    blocks = [part.partition("```")[0] for part in text.split("```toml\n")[1:]]
    (example,) = [block for block in blocks if block.startswith("version = 1")]
    folder = tmp_path / "example"
    folder.mkdir()
    for name in ("package.json", "package-lock.json", "settings.json"):
        (folder / name).write_text("{}")
    (folder / "agent.toml").write_text(example)
    assert tomllib.loads(example)["name"] == load_harness(str(folder / "agent.toml")).name


TELLS = r"""
blocked = False
try:
    urllib.request.urlopen("http://elsewhere.example/", timeout=5)
except OSError:
    blocked = True
for message in answers:
    blocks = [{"type": "text", "text": message.get("content") or ""}]
    print(json.dumps({"type": "assistant", "message": {"id": "x", "content": blocks}}))
    print(json.dumps({"type": "user", "message": {"content": []}}))
print("my key is " + os.environ["KEY"], file=sys.stderr)
if "as-user" in messages[0]["content"]:
    for turn in range(2):  # it makes more of itself than there was
        print(json.dumps({"type": "assistant", "message": {"content": "I thought hard."}}))
        print(json.dumps({"type": "user", "message": {"content": []}}))
print(json.dumps({"type": "result", "result": f"{os.getuid()} {blocked} {pathlib.Path(os.environ['STATE']).exists()}"}))
"""


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.anyio
async def test_an_agent_in_the_sandbox_has_its_model_and_nothing_else(tmp_path: Path) -> None:
    """One trial as root and one as a user; the third asks for more than its steps allow."""
    import anyio

    from proctor.models.scripted import ScriptedServer, call, say

    recipe = write_caller(tmp_path, TELLS)
    tasks = tmp_path / "tasks"
    for name, user in (("as-root", ""), ("as-user", '[agent]\nuser = "user"\n'), ("too-long", "")):
        folder = tasks / name
        (folder / "tests").mkdir(parents=True)
        (folder / "environment").mkdir()
        (folder / "instruction.md").write_text(f"This is {name}.\n")
        (folder / "tests/test.sh").write_text("test -e /tmp/proof; echo $((1 - $?)) > /logs/verifier/reward.txt\n")
        limits = "[proctor.limits]\nsteps = 3\n"
        (folder / "task.toml").write_text(f'schema_version = "1.4"\n{user}[proctor]\nimage = "host"\n{limits}')
    proof = call("bash", command="echo here > /tmp/proof; cat /tmp/proof")
    endless = [call("bash", command=f"echo {number}") for number in range(9)]
    record = tmp_path / "record"
    async with ScriptedServer({"too-long": endless, "*": [proof, say("done")]}) as server:
        words = ("run", str(tasks), "--agent", str(recipe), "--model", f"small@{server.base_url}")
        done = await anyio.to_thread.run_sync(lambda: proctor(*words, "-o", str(record), home=tmp_path / "home"))
        assert done.returncode == 0, done.stderr
        asked = len(server.requests)
    results = {path.name.split("@")[0]: path for path in (record / "trials").iterdir()}
    told = {name: json.loads((path / "result.json").read_text()) for name, path in results.items()}
    assert {name: one["outcome"] for name, one in told.items()} == {
        "as-root": "resolved", "as-user": "resolved", "too-long": "agent_limit",
    }, told  # fmt: skip
    assert told["as-root"]["final_message"] == "0 True True"
    assert told["as-user"]["final_message"] == "1000 True True"
    assert told["too-long"]["stop"] == "limit:calls"
    assert {name: one["usage"]["model_calls"] for name, one in told.items() if name != "too-long"} == {
        "as-root": 2, "as-user": 2,
    }  # fmt: skip
    # What an agent tells of itself is held against what passed the gateway.
    notes = {name: json.loads((path / "findings.json").read_text())["findings"] for name, path in results.items()}
    assert [note["kind"] for note in notes["as-root"]] == []
    assert [(note["kind"], note["severity"], note["detail"]) for note in notes["as-user"]] == [
        ("account-differs", "note", "its transcript has 4 answers of the model, and 2 passed the gateway")
    ]
    # No call beyond the limit reached the upstream, and no token is left in the record.
    assert asked == 2 + 2 + 3
    for path in record.rglob("*"):
        if path.is_file() and path.suffix != ".zst":
            assert b"sk-proctor-" not in path.read_bytes(), path
