"""Records: whole or absent, exact, and true to the page that lists them."""

from __future__ import annotations

import base64
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from proctor.agents.room import RoomEvent
from proctor.common import ConfigError, digest_tree
from proctor.models.contract import ModelFault, Usage
from proctor.models.gateway import CallRecord
from proctor.runs import formats
from proctor.runs.calls import unpacked
from proctor.runs.clock import now_iso
from proctor.runs.formats import ExecLine, ModelCallLine, Stage, StreamLine, TrialResult, load, parse
from proctor.runs.outcome import Outcome
from proctor.runs.record import RecordError, StageClock, TrialRecord, commit, read_lines, record_errors, stream_line
from proctor.sandbox.contract import ExecResult, Output

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "record.md"


def result(**changes: object) -> TrialResult:
    fields: dict[str, object] = dict(
        run_id="r", trial_id="t@a@1", task="t", task_digest="d", agent="a", attempt=1, seed=1, tries=1,
        outcome=Outcome.RESOLVED, stop="finished", started_at=now_iso(), ended_at=now_iso(), duration_s=0.1,
    )  # fmt: skip
    return TrialResult(**(fields | changes))  # type: ignore[arg-type]


def event(stdout: Output, kind: str = "bash") -> RoomEvent:
    done = ExecResult(("bash", "-c", "x"), 0, None, stdout, Output(), False, None, 0.1)
    return RoomEvent(kind, "x", now_iso(), 0.1, 20.0, done)  # type: ignore[arg-type]


@given(st.binary(max_size=200), st.integers(0, 10**12))
def test_output_of_any_bytes_is_kept_exactly(data: bytes, dropped: int) -> None:
    line = stream_line(Output(data, dropped, b"tail"))
    kept = line.text.encode() if line.text is not None else base64.b64decode(line.base64 or "")
    assert kept == data + b"tail"
    assert (line.total, line.dropped) == (len(data) + dropped + 4, dropped)


def test_odd_output_survives_in_the_execution_log(tmp_path: Path) -> None:
    record = TrialRecord(tmp_path / "r")
    outputs = [
        b"\x1b[2J\x00\r\n\x07",
        b"\xff\xfe",
        "\u202e\ud7ff\U0010ffff".encode(),
        b"x" * (3 << 20),
        b'{"step_id": 2}\n',
    ]
    for output in outputs:
        record.room_event(event(Output(output)))
    record.finish(result())
    lines = [
        parse(ExecLine, json.dumps(line).encode(), name="exec") for line in read_lines(tmp_path / "r" / "exec.jsonl")
    ]
    assert [line.seq for line in lines] == [1, 2, 3, 4, 5]
    for line, output in zip(lines, outputs, strict=True):
        assert line.stdout
        kept = line.stdout.text.encode() if line.stdout.text is not None else base64.b64decode(line.stdout.base64 or "")
        assert kept == output


def call(**more: Any) -> CallRecord:
    known = {
        "seq": 1, "trial_id": "t", "at": "2026-11-30T00:00:00Z", "operation": "chat", "asked_model": "asked",
        "model": "m", "upstream": "up", "pinned_model": "asked", "streamed": True, "attempts": 1,
        "request": {"messages": []},
    }  # fmt: skip
    return CallRecord(**{**known, **more})


def test_model_calls_are_kept_as_the_gateway_saw_them(tmp_path: Path) -> None:
    record = TrialRecord(tmp_path / "r")
    stream = "data: ä\r\n\r\n".encode() * 50
    flags = ("model changed: a → got", "provider tool removed: web_search")
    record.model_call(
        call(request={"messages": [{"role": "user", "content": "\x00"}]}, status=200, returned_model="got",
             response={"text": "hi"}, stream=stream, usage=Usage(3, None, 1), flags=flags)
    )  # fmt: skip
    record.model_call(call(seq=2, error="429", fault=ModelFault.OVERLOADED, status=429, raw=b"\xff busy", flags=flags))
    assert record.endpoint_failed
    record.finish(result())
    first, second = (
        parse(ModelCallLine, json.dumps(line).encode(), name="calls")
        for line in read_lines(tmp_path / "r" / "model-calls.jsonl")
    )
    assert (first.requested_model, first.returned_model, first.usage) == (
        "asked",
        "got",
        {"prompt_tokens": 3, "completion_tokens": 1},
    )
    assert first.request["messages"][0]["content"] == "\x00"
    assert unpacked(first.stream or "") == stream
    assert (second.error, second.response, second.fault, second.raw) == ("429", None, "overloaded", "\\xff busy")
    assert (record.model_errors, record.returned_models) == (1, ["got"])
    # What the model never worked on has used nothing; what it did not count is unknown.
    usage = record.usage()
    assert (usage.model_calls, usage.prompt_tokens, usage.cached_tokens, usage.cost_usd) == (1, 3, None, None)
    findings = json.loads((tmp_path / "r" / "findings.json").read_text())["findings"]
    assert [(one["kind"], one["severity"], one["source"]) for one in findings] == [
        ("model-changed", "review", "gateway"),
        ("provider-tool-removed", "note", "gateway"),
    ]


def test_a_commit_is_one_rename_and_supersedes_without_losing(tmp_path: Path) -> None:
    target, old = tmp_path / "trials" / "t", tmp_path / "superseded"
    for number in range(3):
        record = TrialRecord(tmp_path / "trials" / f".tmp-t.{number}")
        record.log(f"try {number}")
        record.finish(result(tries=number + 1))
        done = commit(record, target, superseded=old)
        assert done.digest == digest_tree(target)
    assert load(TrialResult, target / "result.json").tries == 3
    assert [load(TrialResult, old / name / "result.json").tries for name in ("t.1", "t.2")] == [1, 2]
    assert [path.name for path in (tmp_path / "trials").iterdir()] == ["t"]


def test_a_discarded_record_leaves_nothing(tmp_path: Path) -> None:
    record = TrialRecord(tmp_path / "r")
    record.log("x")
    record.discard()
    assert list(tmp_path.iterdir()) == []


def test_stages_come_in_order_and_each_once() -> None:
    clock = StageClock()
    clock.enter(Stage.DISPATCH)
    clock.enter(Stage.EXECUTION)
    for stage in (Stage.EXECUTION, Stage.START):
        with pytest.raises(ValueError, match="cannot follow"):
            clock.enter(stage)
    clock.leave()
    assert clock.current is None
    assert all(time.ended_at and (time.duration_s or 0) >= 0 for time in clock.times)


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EACCES, "cannot write")],
)
def test_errors_of_writing_are_one_line_that_says_what_to_do(code: int, words: str) -> None:
    with pytest.raises(RecordError, match=words) as caught, record_errors("run.json"):
        raise OSError(code, os.strerror(code))
    assert "--resume" in caught.value.line()
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 2}', b"\xff", b"[" * 100_000])
def test_a_bad_record_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"result\.json"):
        load(TrialResult, tmp_path / "result.json")


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="surprise"):
        parse(StreamLine, b'{"surprise": 1}', name="x")


def models() -> list[type[BaseModel]]:
    found = (value for value in vars(formats).values() if isinstance(value, type) and issubclass(value, BaseModel))
    return [model for model in found if model.__module__ == formats.__name__ and not model.__name__.startswith("_")]


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_the_page_lists_every_field_and_every_model_is_strict(model: type[BaseModel]) -> None:
    assert model.model_config["extra"] == "forbid"
    page = PAGE.read_text()
    missing = [name for name in model.model_fields if f"`{name}`" not in page]
    assert not missing, f"{PAGE.name} does not list {model.__name__}.{missing}"
