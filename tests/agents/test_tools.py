"""The tools: what they do, what a model is told when it misuses them, and what of an output it sees."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.agents.contract import ToolCall
from proctor.agents.limits import LimitGuard
from proctor.agents.room import BoundedRoom
from proctor.agents.text import EditError, clip, clip_output, lines_of, replace_text
from proctor.agents.tools import TOOLS, Toolbox, schema
from proctor.agents.toolset import load_toolset, toolset_versions
from proctor.sandbox.contract import Output

if TYPE_CHECKING:
    from proctor.tasks.model import AgentLimits

pytestmark = pytest.mark.anyio


@pytest.fixture
def tools(box: Any, limits: AgentLimits) -> Toolbox:
    """The tools over an empty directory."""
    return Toolbox(BoundedRoom(box, str(box.root), LimitGuard(limits)))


async def use(tools: Toolbox, name: str, raw: str | None = None, **arguments: Any) -> ToolCall:
    call = ToolCall("c1", name, {}, json.dumps(arguments) if raw is None else raw)
    await tools.run(call)
    return call


def error_of(call: ToolCall) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(call.result or "")["error"]
    assert call.error is not None
    assert call.error.startswith(error["kind"])
    return error


async def test_bash_shows_exit_code_and_both_streams(tools: Toolbox) -> None:
    call = await use(tools, "bash", command="echo out; echo err >&2; exit 3")
    assert call.result == "exit code: 3\nstdout:\nout\nstderr:\nerr"
    assert call.error is None
    assert call.duration_s is not None


async def test_bash_is_bash_where_there_is_one(tools: Toolbox) -> None:
    call = await use(tools, "bash", command="[[ x == x ]] && echo ${BASH_VERSION:+bash}")
    assert call.result == "exit code: 0\nstdout:\nbash"


async def test_a_very_long_command_is_run_all_the_same(tools: Toolbox, box: Any) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    call = await use(tools, "bash", command=f"cat > long.txt <<'END'\n{text}END\nwc -l < long.txt; cat | wc -c")
    assert call.result == "exit code: 0\nstdout:\n20000\n0"
    assert (box.root / "long.txt").read_text() == text


async def test_a_timed_out_command_returns_what_it_had_printed(tools: Toolbox) -> None:
    call = await use(tools, "bash", command="echo before; sleep 30", timeout_s=0.3)
    error = error_of(call)
    assert error["kind"] == "timeout"
    assert "before" in error["output"]


async def test_files_are_written_read_and_edited(tools: Toolbox, box: Any) -> None:
    await use(tools, "write_file", path="deep/er/a.txt", content="one\ntwo\nthree\n")
    assert (box.root / "deep/er/a.txt").read_text() == "one\ntwo\nthree\n"
    assert (await use(tools, "read_file", path="deep/er/a.txt")).result == "one\ntwo\nthree\n"
    part = await use(tools, "read_file", path="deep/er/a.txt", offset=2, limit=1)
    assert part.result == "two\n\n[lines 2-2 of 3]"
    await use(tools, "edit_file", path="deep/er/a.txt", old_text="two", new_text="2")
    assert (box.root / "deep/er/a.txt").read_text() == "one\n2\nthree\n"


async def test_an_empty_file_is_called_empty(tools: Toolbox) -> None:
    await use(tools, "write_file", path="nothing", content="")
    assert (await use(tools, "read_file", path="nothing")).result == "[the file is empty]"


async def test_an_optional_field_may_be_null(tools: Toolbox) -> None:
    call = await use(tools, "bash", command="true", timeout_s=None)
    assert call.error is None


@pytest.mark.parametrize(
    ("name", "raw", "kind", "words"),
    [
        ("bash", "", "invalid_arguments", "command: Field required"),
        ("bash", "{", "invalid_json", "not JSON"),
        ("bash", '{"command": "ls"} trailing', "invalid_json", "not JSON"),
        ("bash", '["ls"]', "invalid_json", "must be an object"),
        ("bash", '"ls"', "invalid_json", "must be an object"),
        ("bash", '{"command": NaN}', "invalid_json", "not a JSON number"),
        ("bash", "[" * 100_000, "invalid_json", "not JSON"),
        ("bash", '{"cmd": "ls"}', "invalid_arguments", "cmd: Extra inputs are not permitted"),
        ("bash", '{"command": ["ls", "-l"]}', "invalid_arguments", "command: Input should be a valid string"),
        ("bash", '{"command": ""}', "invalid_arguments", "at least 1 character"),
        ("bash", '{"command": "a\\u0000b"}', "invalid_arguments", "NUL"),
        ("bash", '{"command": "a\\ud800b"}', "invalid_arguments", "lone surrogate"),
        ("bash", '{"command": "ls", "timeout_s": "5"}', "invalid_arguments", "timeout_s"),
        ("bash", '{"command": "ls", "timeout_s": 0}', "invalid_arguments", "greater than 0"),
        ("bash", '{"command": "ls", "security_risk": "LOW"}', "invalid_arguments", "security_risk"),
        ("shell", '{"command": "ls"}', "unknown_tool", "no tool 'shell'"),
        ("read_file", '{"path": "absent"}', "file", "No such file"),
        ("read_file", '{"path": "."}', "file", "directory"),
        ("read_file", '{"path": "a.txt", "offset": 9}', "range", "the file has 2 lines"),
        ("read_file", '{"path": "a.txt", "offset": 0}', "invalid_arguments", "offset"),
        ("read_file", '{"path": "blob"}', "binary", "binary file"),
        ("write_file", '{"path": "b", "content": "\\udc80"}', "invalid_arguments", "lone surrogate"),
        ("write_file", '{"path": "a.txt/b", "content": ""}', "file", ""),
        ("edit_file", '{"path": "absent", "old_text": "a", "new_text": "b"}', "file", "No such file"),
        ("edit_file", '{"path": "a.txt", "old_text": "", "new_text": "b"}', "invalid_arguments", "old_text"),
        ("edit_file", '{"path": "a.txt", "old_text": "zzz", "new_text": "b"}', "edit_missing", "does not occur"),
        ("edit_file", '{"path": "a.txt", "old_text": "same", "new_text": "b"}', "edit_ambiguous", "occurs 2 times"),
        ("edit_file", '{"path": "a.txt", "old_text": "same", "new_text": "same"}', "edit_unchanged", "the same"),
    ],
)
async def test_misuse_is_a_structured_error(
    tools: Toolbox, box: Any, name: str, raw: str, kind: str, words: str
) -> None:
    (box.root / "a.txt").write_text("same one\nsame two\n")
    (box.root / "blob").write_bytes(b"\x7fELF\0\1")
    call = await use(tools, name, raw)
    error = error_of(call)
    assert error["kind"] == kind
    assert words in error["message"]
    assert call.raw_arguments == raw
    assert len(call.result or "") < 2000
    assert (box.root / "a.txt").read_text() == "same one\nsame two\n"


async def test_a_missing_field_lists_what_is_required(tools: Toolbox) -> None:
    error = error_of(await use(tools, "edit_file", path="a"))
    assert error["required"] == ["path", "old_text", "new_text"]
    assert {problem["field"] for problem in error["fields"]} == {"old_text", "new_text"}


async def test_nothing_runs_after_finish(tools: Toolbox, box: Any) -> None:
    await use(tools, "finish", message="done")
    call = await use(tools, "write_file", path="late", content="x")
    assert error_of(call)["kind"] == "already_finished"
    assert tools.finished == "done"
    assert not (box.root / "late").exists()


async def test_a_file_that_is_too_large_is_refused(tools: Toolbox, box: Any) -> None:
    with (box.root / "big").open("wb") as file:
        file.truncate(17 << 20)
    assert "larger than" in error_of(await use(tools, "read_file", path="big"))["message"]


async def test_editing_keeps_the_bytes_that_are_not_text(tools: Toolbox, box: Any) -> None:
    (box.root / "latin").write_bytes(b"caf\xe9 one\n")
    await use(tools, "edit_file", path="latin", old_text="one", new_text="zwölf")
    assert (box.root / "latin").read_bytes() == b"caf\xe9 zw\xc3\xb6lf\n"


async def test_crlf_is_hinted_at(tools: Toolbox, box: Any) -> None:
    (box.root / "dos").write_bytes(b"a\r\nb\r\n")
    error = error_of(await use(tools, "edit_file", path="dos", old_text="a\nb", new_text="c"))
    assert "CRLF" in error["message"]


@pytest.mark.parametrize("version", toolset_versions())
def test_what_a_model_is_told_is_what_is_checked(version: str) -> None:
    """The definitions are data; what is checked are the classes. They say the same, but for words."""
    toolset = load_toolset(version)
    told = toolset.tools(20.0, with_user=True)
    assert [tool["function"]["name"] for tool in told] == list(TOOLS)
    for tool in told:
        function = tool["function"]
        parameters = function["parameters"]
        assert function["description"]
        assert all("description" in prop for prop in parameters["properties"].values())
        assert without_words(parameters) == without_words(schema(TOOLS[function["name"]]))
        assert parameters["additionalProperties"] is False
    assert "At most 20," in str(told[0])
    assert "${" not in str(told)
    assert [tool["function"]["name"] for tool in toolset.tools(20.0)] == [name for name in TOOLS if name != "ask_user"]


def test_a_released_toolset_does_not_change() -> None:
    """Results made with a version stay comparable. A change of words is a new version: a folder of its own."""
    assert load_toolset("1").digest == "sha256:add23265f58c34e21527ac478b67cedc97dc959228102fe39c0cfcc63d61bbab"


def without_words(parameters: dict[str, Any]) -> dict[str, Any]:
    properties = {
        name: {key: value for key, value in prop.items() if key not in ("description", "default")}
        for name, prop in parameters["properties"].items()
    }
    return {**parameters, "properties": properties, "required": sorted(parameters.get("required", []))}


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@given(any_text, any_text, any_text, any_text)
def test_an_edit_replaces_exactly_the_one_place(before: str, old: str, after: str, new: str) -> None:
    content = (before + old + after).encode()
    places = sum(content.startswith(old.encode(), at) for at in range(len(content)))
    kind = "empty" if not old else "unchanged" if old == new else "ambiguous" if places > 1 else None
    if kind is None:
        assert replace_text(content, old, new) == ((before + new + after).encode(), 1)
        return
    with pytest.raises(EditError) as caught:
        replace_text(content, old, new)
    assert caught.value.kind == kind


@given(any_text, st.text("ab", min_size=1, max_size=3), any_text)
def test_replace_all_is_str_replace(content: str, old: str, new: str) -> None:
    if old == new or old not in content:
        return
    assert replace_text(content.encode(), old, new, everywhere=True)[0] == content.replace(old, new).encode()


@given(st.text(max_size=300), st.integers(0, 120))
def test_clip_keeps_head_and_tail_and_counts_the_rest(text: str, limit: int) -> None:
    shown = clip(text, limit)
    if len(text) <= limit:
        assert shown == text
        return
    front = limit // 2
    assert shown.startswith(text[:front])
    assert shown.endswith(text[len(text) - (limit - front) :])
    assert f"[… {len(text) - limit} characters dropped …]" in shown


@given(any_text, any_text, st.integers(0, 10), st.integers(0, 10), st.integers(1, 50), st.integers(0, 100))
def test_truncation_never_splits_a_code_point(
    head: str, tail: str, head_cut: int, tail_cut: int, dropped: int, limit: int
) -> None:
    head_bytes, tail_bytes = head.encode(), tail.encode()
    output = Output(head_bytes[: max(0, len(head_bytes) - head_cut)], dropped, tail_bytes[tail_cut:])
    shown = clip_output(output, limit)
    if "\ufffd" not in head + tail:
        assert "\ufffd" not in shown
    # What is shown and what is counted make up the whole.
    first, _, rest = shown.partition("\n[… ")
    count, _, last = rest.partition(" bytes dropped …]\n")
    if "\n[… " not in head + tail:
        assert len(first.encode()) + int(count) + len(last.encode()) == output.total


@given(st.binary(max_size=200), st.integers(0, 100))
def test_any_bytes_can_be_shown(data: bytes, limit: int) -> None:
    clip_output(Output(data), limit).encode()
    clip_output(Output(data, 5, data), limit).encode()


@given(st.text("ab\n\r\u2028", max_size=40))
def test_lines_add_up_to_the_file(text: str) -> None:
    total = lines_of(text, 1, None)[2]
    assert "".join(lines_of(text, number, 1)[0] for number in range(1, total + 1)) == text
