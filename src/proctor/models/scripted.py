"""A model server that answers from a script, over real HTTP on loopback: for tests and demonstrations.

`async with ScriptedServer([call("bash", command="ls"), call("finish")]) as server:` then use `server.base_url`.
A script is a list of turns, a table of such lists, or a function; see ScriptedServer. From the command line:
`python -m proctor.models.scripted SCRIPT.json`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio

from proctor.common import ConfigError, ExitCode, digest_json
from proctor.models.scripted_forms import Protocol, error_body, events, first_user_text, turn_of, whole
from proctor.models.serving import served

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

DEFAULT_KEY = "*"

_PROTOCOLS: Mapping[str, Protocol] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One scripted answer, or one scripted fault.

    `tool_calls` holds `(name, arguments)`; arguments that are text are sent as they are, malformed or not. With
    `body` these bytes are the whole reply. `delay_s` passes before the first byte, `chunk_delay_s` before each
    further event. `cut_after` breaks the connection after so many events (or, not streamed, half the body).
    """

    text: str = ""
    tool_calls: tuple[tuple[str, Mapping[str, Any] | str], ...] = ()
    reasoning: str | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = field(default_factory=lambda: {"prompt_tokens": 10, "completion_tokens": 5})
    model: str | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    cut_after: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the answer (of every chunk, in chat), such as `system_fingerprint` or one nobody knows."""


def say(text: str, **more: Any) -> Answer:
    """An answer of text alone."""
    return Answer(text=text, **more)


def call(name: str, **arguments: Any) -> Answer:
    """An answer with one tool call."""
    return Answer(tool_calls=((name, arguments),))


def calls(*pairs: tuple[str, Mapping[str, Any] | str], text: str = "") -> Answer:
    """An answer with several tool calls; arguments that are text are sent as they are."""
    return Answer(text=text, tool_calls=pairs)


def raw(body: bytes | str, *, content_type: str = "application/json", status: int = 200, **more: Any) -> Answer:
    """These bytes, whatever they are."""
    data = body.encode() if isinstance(body, str) else body
    return Answer(body=data, headers={"content-type": content_type}, status=status, **more)


def fault(status: int, message: str = "scripted fault", *, retry_after: str | None = None, code: str = "") -> Answer:
    """An HTTP error with an error object."""
    headers = {"content-type": "application/json"} | ({"retry-after": retry_after} if retry_after else {})
    body = json.dumps({"error": {"message": message, "type": "scripted", "code": code or status}}).encode()
    return Answer(body=body, headers=headers, status=status)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What arrived: the parsed body, the headers, the turn (how many answers the conversation holds already)
    and how often this very request came before."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]
    turn: int
    repeat: int
    protocol: Protocol = "chat"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far (chat and messages)."""
        return list(self.body.get("messages") or ())


Turn = Answer | Sequence[Answer]
Script = Sequence[Turn] | Mapping[str, Sequence[Turn]] | Callable[[ChatRequest], Answer | Awaitable[Answer]]


class ScriptedServer:
    """Serves OpenAI chat completions and responses and Anthropic messages, streamed and not, on a random port of
    127.0.0.1: `POST /v1/chat/completions`, `/v1/responses`, `/v1/messages` (and its `count_tokens`), `GET /v1/models`.

    A list: answer number `n` goes to a request whose conversation holds `n` assistant messages, so any number of
    trials may play the same script side by side and retries do no harm. A turn that is itself a list gives one
    answer after the other to repeats of the same request (`[fault(429), say("hello")]`), and its last from then on.
    A table: the list whose key is the model's name, or else occurs in the first user message, or else `*`. A
    function: called with the ChatRequest. A request past the end of the script gets status 400.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[ChatRequest] = []
        self.base_url = ""
        self._seen: Counter[str] = Counter()
        self._stack: contextlib.AsyncExitStack | None = None

    @classmethod
    def from_file(cls, path: Path) -> ScriptedServer:
        """A server for a JSON script: see `load_answers`."""
        return cls(load_answers(path))

    async def __aenter__(self) -> Self:
        stack = contextlib.AsyncExitStack()
        self.base_url = f"{await stack.enter_async_context(served(self._app()))}/v1"
        self._stack = stack
        return self

    async def __aexit__(self, *details: object) -> None:
        if self._stack is not None:
            await self._stack.aclose()
            self._stack = None

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._handle, methods=["POST"]),
                Route("/v1/responses", self._handle, methods=["POST"]),
                Route("/v1/messages", self._handle, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ]
        )

    async def _count(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"input_tokens": len(await request.body()) // 4})

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"object": "list", "data": []})

    async def _handle(self, request: Request) -> Response:
        from starlette.responses import Response

        protocol = _PROTOCOLS[request.url.path]
        try:
            body = json.loads(await request.body())
            turn = turn_of(protocol, body)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problem = error_body(protocol, f"not a {protocol} request: {error!r}")
            return Response(problem, 400, media_type="application/json")
        digest = digest_json(body)
        chat = ChatRequest(body, dict(request.headers), turn, self._seen[digest], protocol)
        self._seen[digest] += 1
        self.requests.append(chat)
        answer = await self._choose(chat)
        await anyio.sleep(answer.delay_s)
        return _response(answer, chat)

    async def _choose(self, chat: ChatRequest) -> Answer:
        if callable(self.script):
            chosen = self.script(chat)
            return await chosen if inspect.isawaitable(chosen) else chosen
        turns = self.script
        if isinstance(turns, Mapping):
            turns = turns.get(_key(turns, chat), ())
        if chat.turn >= len(turns):
            return fault(400, f"the script has {len(turns)} turns and is exhausted")
        turn = turns[chat.turn]
        return turn if isinstance(turn, Answer) else turn[min(chat.repeat, len(turn) - 1)]


def _key(table: Mapping[str, Any], chat: ChatRequest) -> str:
    if (model := str(chat.body.get("model"))) in table:
        return model
    first = first_user_text(chat.protocol, chat.body)
    return next((key for key in table if key != DEFAULT_KEY and key in first), DEFAULT_KEY)


def _response(answer: Answer, chat: ChatRequest) -> Response:
    from starlette.responses import Response, StreamingResponse

    headers = dict(answer.headers)
    if answer.body is not None:
        pieces = [answer.body]
    elif chat.body.get("stream"):
        headers.setdefault("content-type", "text/event-stream")
        pieces = list(events(answer, chat))
    else:
        headers.setdefault("content-type", "application/json")
        pieces = [json.dumps(whole(answer, chat)).encode()]
    if answer.cut_after is None and not answer.chunk_delay_s:
        return Response(b"".join(pieces), answer.status, headers)
    if answer.cut_after is not None:
        one = len(pieces) == 1
        pieces = [pieces[0][: len(pieces[0]) // 2]] if one else pieces[: max(answer.cut_after, 1)]
    return StreamingResponse(_sent(answer, pieces), answer.status, headers)


async def _sent(answer: Answer, pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
        await anyio.sleep(answer.chunk_delay_s)
    if answer.cut_after is not None:
        raise _CutError


class _CutError(Exception):
    """Makes the server drop the connection, as a dying endpoint does."""


def load_answers(path: Path) -> dict[str, list[Turn]]:
    """A script from a JSON file: `{"<key>": [turn, …]}` or one bare list.

    A turn is an object with Answer's fields, where `tool_calls` is a list of `{"name", "arguments"}`, or a list of
    such objects. Raises ConfigError.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        table = content if isinstance(content, dict) else {DEFAULT_KEY: content}
        return {key: [_turn(item) for item in turns] for key, turns in table.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"not a model script: {error}", field=str(path), remedy="see docs/agents.md") from error


def _turn(item: Any) -> Turn:
    if isinstance(item, list):
        return [_answer(one) for one in item]
    return _answer(item)


def _answer(item: Mapping[str, Any]) -> Answer:
    values = dict(item)
    values["tool_calls"] = tuple((one["name"], one["arguments"]) for one in values.get("tool_calls", ()))
    if isinstance(values.get("body"), str):
        values["body"] = values["body"].encode()
    return Answer(**values)


async def _main(path: Path) -> None:
    async with ScriptedServer.from_file(path) as server:
        print(server.base_url, flush=True)
        await anyio.sleep_forever()


def main(arguments: Sequence[str]) -> int:
    """`python -m proctor.models.scripted SCRIPT.json`: print the base URL and serve until interrupted."""
    import sys

    if len(arguments) != 1:
        print("usage: python -m proctor.models.scripted SCRIPT.json", file=sys.stderr)
        return int(ExitCode.USAGE)
    try:
        anyio.run(_main, Path(arguments[0]))
    except ConfigError as error:
        print(error.line(), file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
