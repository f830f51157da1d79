"""Reading an answer while it passes: token counts, model id, fingerprint, and the whole of it for the record.

A reader never changes what passes, and whatever an endpoint sends, it never fails: an answer that cannot be understood
is `bad_reply`, with the reason, and still goes to whoever asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from proctor.models.contract import ModelFault, Usage
from proctor.models.reply import (
    Assembler,
    BadReply,
    ErrorReply,
    count_of,
    error_of,
    parse_json,
    strict_json,
    usage_of,
    well_formed,
    whole_answer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.models.gateway.dialects import Operation


@dataclass(slots=True)
class Seen:
    """What one event was: whether the answer has begun, whether this is its last event, and whether it holds nothing
    but token counts that only we asked for."""

    begun: bool = False
    last: bool = False
    only_usage: bool = False


class Reader:
    """What all protocols have in common; each gives `_event`, `_whole` and `_closing`."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.cache_write_tokens: int | None = None
        self.returned_model: str | None = None
        self.fingerprint: str | None = None
        self.service_tier: str | None = None
        self.response: Mapping[str, Any] | None = None
        self.response_id: str | None = None
        self.problem = ""
        self.fault: ModelFault | None = None
        self._closed = False
        self.ended = False
        """True once the answer is known to be whole."""

    def event(self, name: str, data: bytes) -> Seen:
        """Take one event of a stream."""
        seen = Seen()
        if not data or self.problem:
            return seen
        try:
            self._event(name, data.decode("utf-8", "replace"), seen)
        except (BadReply, ErrorReply) as error:
            self._fail(error)
        return seen

    def whole(self, body: bytes) -> None:
        """Take an answer that came in one piece."""
        try:
            value = parse_json(body.decode("utf-8", "replace"))
            if b"\\u" in body:
                # Only an escape can bring half of a surrogate pair, which no file could hold.
                value = well_formed(dict(value))
            self._whole(value)
            self.response, self.ended = value, True
        except (BadReply, ErrorReply) as error:
            self._fail(error)

    def close(self) -> None:
        """The stream has ended, rightly or not: make what came of it. Idempotent."""
        if not self._closed:
            self._closed = True
            self._closing()

    def _fail(self, error: BadReply | ErrorReply) -> None:
        self.problem = str(error)
        if isinstance(error, ErrorReply):
            self.fault = ModelFault.OVERLOADED if is_busy(error) else ModelFault.REFUSED
            self.problem = f"the endpoint reports an error: {error.message}"
        else:
            self.fault = ModelFault.BAD_REPLY

    def _take(self, value: Mapping[str, Any]) -> None:
        for name, attribute in (("model", "returned_model"), ("system_fingerprint", "fingerprint"),
                                ("service_tier", "service_tier"), ("id", "response_id")):  # fmt: skip
            if isinstance(text := value.get(name), str) and text:
                setattr(self, attribute, text)

    def _event(self, name: str, data: str, seen: Seen) -> None:
        raise NotImplementedError

    def _whole(self, value: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _closing(self) -> None:
        raise NotImplementedError


def is_busy(error: ErrorReply) -> bool:
    """Whether an error object means that another try may be answered."""
    words = f"{error.code} {error.kind}".lower()
    return any(word in words for word in ("overload", "rate_limit", "server_error", "api_error"))


class ChatReader(Reader):
    """OpenAI chat completions."""

    def __init__(self) -> None:
        super().__init__()
        self._assembler = Assembler()

    def _event(self, name: str, data: str, seen: Seen) -> None:
        if data.strip() == "[DONE]":
            seen.last = self.ended = True
            return
        chunk = parse_json(data)
        self._assembler.take(chunk)
        # Every chunk says again what the first one said; only a change is of interest.
        if self.returned_model is None or chunk.get("model") != self.returned_model or self.fingerprint is None:
            self._take(chunk)
        seen.begun = self._assembler.started
        if isinstance(counts := chunk.get("usage"), dict):
            self._counts(counts)
            seen.only_usage = not chunk.get("choices")

    def _whole(self, value: Mapping[str, Any]) -> None:
        self._take(value)
        if isinstance(counts := value.get("usage"), dict):
            self._counts(counts)
        whole_answer(value, is_well_formed=True)

    def _counts(self, counts: Mapping[str, Any]) -> None:
        self.usage = usage_of(counts, None)
        details = counts.get("prompt_tokens_details")
        self.cache_write_tokens = count_of(details.get("cache_write_tokens")) if isinstance(details, dict) else None

    def _closing(self) -> None:
        try:
            self.response = dict(self._assembler.answer().raw)
        except BadReply as error:
            if not self.problem:
                self._fail(error)
            return
        # An endpoint that forgets [DONE] has still ended its answer when it gave the reason why it stopped.
        self.ended = self.ended or self._assembler.finish_reason is not None


class ResponsesReader(Reader):
    """OpenAI responses."""

    _LAST: ClassVar[frozenset[str]] = frozenset({"response.completed", "response.incomplete", "response.failed"})

    def _event(self, name: str, data: str, seen: Seen) -> None:
        if data.strip() == "[DONE]":
            return
        value = parse_json(data)
        kind = str(value.get("type") or name)
        if kind == "error":
            raise ErrorReply(str(value.get("message")), str(value.get("code") or ""), "error")
        inner = value.get("response")
        if isinstance(inner, dict):
            self._take(inner)
            self.response = inner
        seen.begun = kind.endswith((".delta", ".added"))
        if kind in self._LAST:
            seen.last = self.ended = True
            if isinstance(inner, dict):
                self._counts(inner.get("usage"))
                if kind == "response.failed" and (problem := error_of(inner)):
                    raise problem

    def _whole(self, value: Mapping[str, Any]) -> None:
        self._take(value)
        self._counts(value.get("usage"))
        if not isinstance(value.get("output"), list):
            raise BadReply("the reply has no list of output")

    def _closing(self) -> None:
        self.response = well_formed(dict(self.response)) if self.response is not None else None

    def _counts(self, counts: Any) -> None:
        if not isinstance(counts, dict):
            return
        into, out = counts.get("input_tokens_details"), counts.get("output_tokens_details")
        self.cache_write_tokens = count_of(into.get("cache_write_tokens")) if isinstance(into, dict) else None
        self.usage = Usage(
            prompt_tokens=count_of(counts.get("input_tokens")),
            cached_tokens=count_of(into.get("cached_tokens")) if isinstance(into, dict) else None,
            completion_tokens=count_of(counts.get("output_tokens")),
            reasoning_tokens=count_of(out.get("reasoning_tokens")) if isinstance(out, dict) else None,
        )


_PIECES = {
    "text_delta": "text", "input_json_delta": "partial_json", "thinking_delta": "thinking",
    "signature_delta": "signature",
}  # fmt: skip
"""The kinds of deltas of a messages stream, and the field that each brings a piece of."""


class MessagesReader(Reader):
    """Anthropic messages. Its `input_tokens` are those that no cache gave or took; a prompt is all three together."""

    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] | None = None
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}
        self._counted: dict[str, Any] = {}

    def _event(self, name: str, data: str, seen: Seen) -> None:
        value = parse_json(data)
        kind = value.get("type")
        if kind == "message_start" and isinstance(message := value.get("message"), dict):
            self._message = dict(message)
            self._take(message)
            self._count(message.get("usage"), whole=False)
        elif kind == "content_block_start" and isinstance(block := value.get("content_block"), dict):
            self._blocks[_index(value)] = dict(block)
            seen.begun = True
        elif kind == "content_block_delta" and isinstance(delta := value.get("delta"), dict):
            seen.begun = True
            field = _PIECES.get(str(delta.get("type")))
            if field is not None and isinstance(piece := delta.get(field), str):
                self._pieces.setdefault((_index(value), field), []).append(piece)
            elif isinstance(citation := delta.get("citation"), dict):
                block = self._blocks.setdefault(_index(value), {})
                before = block.get("citations")
                block["citations"] = [*(before if isinstance(before, list) else ()), citation]
        elif kind == "message_delta":
            if self._message is not None and isinstance(delta := value.get("delta"), dict):
                self._message.update(delta)
            self._count(value.get("usage"), whole=True)
        elif kind == "message_stop":
            seen.last = self.ended = True

    def _count(self, counts: Any, *, whole: bool) -> None:
        """Counts are cumulative: later ones replace earlier. Before the end the output is not known."""
        if not isinstance(counts, dict):
            return
        self._counted.update({name: value for name, value in counts.items() if value is not None})
        fresh = count_of(self._counted.get("input_tokens"))
        read = count_of(self._counted.get("cache_read_input_tokens"))
        self.cache_write_tokens = count_of(self._counted.get("cache_creation_input_tokens"))
        for name in ("service_tier", "speed"):
            if isinstance(tier := self._counted.get(name), str) and tier != "standard":
                self.service_tier = tier
        details = self._counted.get("output_tokens_details")
        self.usage = Usage(
            prompt_tokens=None if fresh is None else fresh + (read or 0) + (self.cache_write_tokens or 0),
            cached_tokens=read,
            completion_tokens=count_of(self._counted.get("output_tokens")) if whole else None,
            reasoning_tokens=count_of(details.get("thinking_tokens")) if isinstance(details, dict) else None,
        )

    def _whole(self, value: Mapping[str, Any]) -> None:
        self._take(value)
        self._count(value.get("usage"), whole=True)
        if not isinstance(value.get("content"), list):
            raise BadReply("the reply has no list of content")

    def _closing(self) -> None:
        if self._message is None:
            if not self.problem:
                self._fail(BadReply("the stream had no message"))
            return
        for (index, field), pieces in self._pieces.items():
            block = self._blocks.setdefault(index, {})
            if field == "partial_json":
                block.update(_input("".join(pieces)))
            else:
                block[field] = str(block.get(field) or "") + "".join(pieces)
        self._message["content"] = [self._blocks[index] for index in sorted(self._blocks)]
        self._message["usage"] = self._counted
        self.response = well_formed(self._message)


def _input(text: str) -> dict[str, Any]:
    """The input of a tool that came in pieces of text; the text itself, where it is not JSON."""
    try:
        return {"input": strict_json(text) if text.strip() else {}}
    except ValueError:
        return {"partial_json": text}


def _index(value: Mapping[str, Any]) -> int:
    index = value.get("index")
    return index if isinstance(index, int) else 0


class CountReader(Reader):
    """`count_tokens`: a number, and no tokens used."""

    def _event(self, name: str, data: str, seen: Seen) -> None:
        """A count is never streamed."""

    def _whole(self, value: Mapping[str, Any]) -> None:
        if count_of(value.get("input_tokens")) is None:
            raise BadReply("the reply has no input_tokens")
        self.usage = Usage(prompt_tokens=0, completion_tokens=0)

    def _closing(self) -> None:
        """Nothing was kept back."""


_READERS: Mapping[str, type[Reader]] = {
    "chat": ChatReader, "responses": ResponsesReader, "messages": MessagesReader, "count_tokens": CountReader,
}  # fmt: skip


def reader_for(operation: Operation) -> Reader:
    """A fresh reader for one answer."""
    return _READERS[operation.name]()
