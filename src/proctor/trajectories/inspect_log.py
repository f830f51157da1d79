"""Inspect AI: `.eval` logs (zip) and their JSON form; one trajectory for each sample and epoch.

Messages make the steps. The model events of the sample say when and at what cost; large texts are pooled in
`attachments` and are put back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError
from proctor.trajectories.atif import Metrics
from proctor.trajectories.draft import Draft, DraftStep, Imported, count_of, iso, mapping, sums, text_of
from proctor.trajectories.zipped import Zipped

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "inspect"
_ATTACHMENT = "attachment://"
_KNOWN_EVENTS = frozenset({"model", "tool"})
_SAMPLE_KEPT = ("scores", "target", "limit", "error", "total_time", "working_time", "uuid", "choices")


def is_inspect(value: Any) -> bool:
    """True for a JSON log."""
    return isinstance(value, Mapping) and {"status", "eval", "samples"} <= value.keys()


def import_eval(path: Path) -> Iterator[Imported]:
    """The samples of an `.eval` file, in the order of their names. Raises ConfigError."""
    with Zipped(path) as archive:
        if "header.json" in archive.names:
            header = _json(archive.read("header.json"), f"{path}: header.json")
        elif "_journal/start.json" in archive.names:
            header = _json(archive.read("_journal/start.json"), f"{path}: _journal/start.json")
        else:
            raise ConfigError("there is neither header.json nor _journal/start.json in it", field=str(path),
                              remedy="is this an Inspect log?")  # fmt: skip
        samples = sorted(name for name in archive.names if name.startswith("samples/") and name.endswith(".json"))
        if not samples:
            raise ConfigError("there is no sample in it", field=str(path))
        for name in samples:
            sample = _json(archive.read(name), f"{path}: {name}")
            yield import_sample(header, sample, file=f"{path}: {name}", unfinished="header.json" not in archive.names)


def import_log(value: Mapping[str, Any], *, file: str) -> Iterator[Imported]:
    """The samples of a JSON log."""
    for number, sample in enumerate(value["samples"] or ()):
        if not isinstance(sample, Mapping):
            raise ConfigError("not a sample", field=f"{file}: samples[{number}]")
        yield import_sample(value, sample, file=f"{file}: samples[{number}]")


def _json(data: bytes, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", field=name) from error
    if not isinstance(value, Mapping):
        raise ConfigError("not a JSON object", field=name)
    return value


def import_sample(
    header: Mapping[str, Any], sample: Mapping[str, Any], *, file: str, unfinished: bool = False
) -> Imported:
    """One sample."""
    about = mapping(header.get("eval"))
    packages = mapping(about.get("packages"))
    label = f"{sample.get('id')}, epoch {sample.get('epoch')}"
    draft = Draft(
        FORMAT,
        agent=text_of(about.get("solver")) or "inspect",
        version=text_of(packages.get("inspect_ai")) or "unknown",
        model=text_of(about.get("model")) or None,
        session_id=text_of(about.get("run_id")) or None,
        trajectory_id=text_of(sample.get("uuid")) or None,
    )
    kept = {name: sample[name] for name in _SAMPLE_KEPT if sample.get(name)}
    draft.extra |= {"task": about.get("task"), "sample": sample.get("id"), "epoch": sample.get("epoch"), **kept}
    if unfinished:
        draft.losses.add("results: the log was not finished")
    pool = sample.get("attachments")
    _Reader(draft, pool if isinstance(pool, Mapping) else {}, sample.get("events") or ()).read(
        sample.get("messages") or ()
    )
    draft.totals = sums(draft.steps)
    _total(draft, mapping(sample.get("model_usage")))
    for name in ("store", "metadata", "events_data", "timelines"):
        if sample.get(name):
            draft.losses.add(f"{name} of the sample")
    return draft.finish(file=file, name=label)


def _total(draft: Draft, by_model: Mapping[str, Any]) -> None:
    """The sample's own sum of tokens, which knows calls that are in no message."""
    found = [one for one in (_usage(mapping(usage)) for usage in by_model.values()) if one is not None]
    for name in ("prompt_tokens", "completion_tokens"):
        values = [getattr(one, name) for one in found]
        if values and None not in values:
            draft.totals[f"total_{name}"] = sum(values)


class _Reader:
    """Puts messages in their places, and the model events with them."""

    def __init__(self, draft: Draft, pool: Mapping[str, Any], events: Any) -> None:
        self._draft = draft
        self._pool = pool
        self._events: dict[str, Mapping[str, Any]] = {}
        self._nameless: list[Mapping[str, Any]] = []
        for event in events:
            kind = event.get("event") if isinstance(event, Mapping) else None
            if kind == "model":
                message = _choice_message(event)
                if text_of(message.get("id")):
                    self._events[text_of(message["id"])] = event
                else:
                    self._nameless.append(event)  # logs of early versions
            if kind not in _KNOWN_EVENTS:
                draft.losses.add(f"an event of kind {kind}")

    def read(self, messages: Any) -> None:
        for message in messages:
            if not isinstance(message, Mapping):
                self._draft.losses.add("a message that is no object")
                continue
            role = message.get("role")
            text, thoughts = self._content(message.get("content"))
            if role == "assistant":
                self._assistant(message, text, thoughts)
            elif role == "tool":
                self._tool(message, text)
            else:
                self._draft.add("system" if role == "system" else "user", text)

    def _assistant(self, message: Mapping[str, Any], text: str, thoughts: str) -> None:
        event = self._events.get(text_of(message.get("id")), {})
        if not event and self._nameless and message.get("source") == "generate":
            event = self._nameless.pop(0)
        given = message.get("source") != "generate" and not event
        step = self._draft.add(
            "agent",
            text,
            reasoning=thoughts or None,
            timestamp=iso(event.get("timestamp")),
            model_name=text_of(message.get("model")) or self._draft.model,
            llm_calls=None if given else 1,
            copied=True if given else None,
        )
        if event:
            step.metrics = _metrics(event)
            if event.get("working_time") is not None:
                step.extra["working_time_s"] = event["working_time"]
        self._calls(step, message)

    def _calls(self, step: DraftStep, message: Mapping[str, Any]) -> None:
        for call in message.get("tool_calls") or ():
            if isinstance(call, Mapping):
                arguments = call.get("arguments")
                if isinstance(arguments, Mapping):
                    arguments = {name: self._put_back(value) for name, value in arguments.items()}
                step.call(call.get("function"), arguments, call.get("id"), parse_error=call.get("parse_error"))

    def _tool(self, message: Mapping[str, Any], text: str) -> None:
        step = self._draft.last_agent()
        if step is None:
            self._draft.losses.add("a tool's answer that no call asked for")
            return
        said = mapping(message.get("error")).get("message")
        step.result(
            text or said, text_of(message.get("tool_call_id")) or None, error=said, name=message.get("function")
        )

    def _content(self, content: Any) -> tuple[str, str]:
        """A message's text and its reasoning; anything else is counted as lost."""
        if not isinstance(content, list):
            return text_of(self._put_back(content)), ""
        texts, thoughts = [], []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                texts.append(text_of(self._put_back(part.get("text"))))
            elif kind == "reasoning":
                thoughts.append(text_of(self._put_back(part.get("reasoning") or part.get("summary"))))
            elif kind == "tool_use":
                texts.append(f"[{text_of(part.get('name'))}: {text_of(self._put_back(part.get('result')))}]")
                self._draft.losses.add("a tool of the provider's own, kept as text")
            else:
                self._draft.losses.add(f"a part of a message of type {kind}")
        return "\n".join(texts), "\n".join(thoughts)

    def _put_back(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith(_ATTACHMENT):
            key = value.removeprefix(_ATTACHMENT)
            if key in self._pool:
                return self._pool[key]
            self._draft.losses.add("a text whose attachment is not in the file")
        return value


def _choice_message(event: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = mapping(event.get("output")).get("choices")
    return mapping(mapping(choices[0]).get("message")) if isinstance(choices, list) and choices else {}


def _metrics(event: Mapping[str, Any]) -> Metrics | None:
    return _usage(mapping(mapping(event.get("output")).get("usage")))


def _usage(usage: Mapping[str, Any]) -> Metrics | None:
    """Inspect counts what went through the cache apart; ATIF's prompt tokens include it."""
    if not usage:
        return None
    given = [
        count_of(usage.get(name)) for name in ("input_tokens", "input_tokens_cache_read", "input_tokens_cache_write")
    ]
    prompt = sum(one or 0 for one in given) if given[0] is not None else None
    reasoning = count_of(usage.get("reasoning_tokens"))
    return Metrics(
        prompt_tokens=prompt,
        completion_tokens=count_of(usage.get("output_tokens")),
        cached_tokens=given[1],
        extra={"reasoning_tokens": reasoning} if reasoning is not None else None,
    )
