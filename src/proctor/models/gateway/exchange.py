"""One call, from the request to the record: admitted, enforced, tried until answered, handed over, settled.

The invariant: a call is on record before the last byte of its answer is handed over, and it is settled exactly once,
however it ends. Nothing is tried again once a byte has been handed over.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio

from proctor.models.contract import ModelFault
from proctor.models.gateway.access import Estimate, Exceeded, estimated
from proctor.models.gateway.answer import Answer
from proctor.models.gateway.body import BadBody, Body
from proctor.models.gateway.calls import Try
from proctor.models.gateway.dialects import Prepared, error_body, error_kind, prepare
from proctor.models.gateway.prices import Tariff
from proctor.models.gateway.settling import begun, settle
from proctor.models.gateway.upstream import TryFailed
from proctor.models.retry import delay_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from proctor.models.gateway.access import TrialAccess
    from proctor.models.gateway.config import ModelConfig
    from proctor.models.gateway.dialects import Operation
    from proctor.models.gateway.gateway import Gateway
    from proctor.models.gateway.upstream import Upstream

_LAST_S = 0.05
_GUESSED_COMPLETION = 1024
_DROPPED = frozenset({
    "connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "te", "trailer", "upgrade",
    "proxy-authenticate", "set-cookie", "location", "alt-svc", "strict-transport-security", "openai-organization",
    "openai-project", "date", "server",
})  # fmt: skip
_STATUS = {ModelFault.TIMEOUT: 504, ModelFault.REFUSED: 404}
"""The status of an error for which the upstream gave none; 502 for the rest."""


_IN_GENERAL = {
    ModelFault.UNREACHABLE: "the model's endpoint cannot be reached",
    ModelFault.TIMEOUT: "the model's endpoint did not answer in time",
    ModelFault.CUT: "the connection to the model's endpoint broke",
    ModelFault.OVERLOADED: "the model's endpoint is overloaded",
    ModelFault.BAD_REPLY: "the model's endpoint sent no answer",
}


class CutShort(Exception):
    """The answer broke off after it had begun; whoever reads it must see that it did."""


class Exchange:
    """One call. `open` it, send `status` and `headers`, then hand over its `chunks()`; `close` it in every case."""

    def __init__(
        self,
        gateway: Gateway,
        access: TrialAccess,
        operation: Operation,
        raw: bytes,
        passed: Mapping[str, str],
        *,
        trusted: bool = False,
    ) -> None:
        self.gateway, self.access, self.operation = gateway, access, operation
        self.raw, self.passed, self._trusted = raw, passed, trusted
        access.numbers += 1
        self.number = access.numbers
        self.status = 0
        self.headers: dict[str, str] = {}
        self.clean = access.redactor.raw(gateway.redactor.raw(raw))
        """The request without a secret, for the record."""
        self.at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        self.began_at = anyio.current_time()
        self.queued_s = 0.0
        self.values: Mapping[str, Any] = {}
        self.asked = ""
        self.prepared = Prepared(b"", streamed=False)
        self.model: ModelConfig | None = None
        self.upstream: Upstream | None = None
        self.tariff = Tariff(None)
        self.reserved: Estimate | None = None
        self.attempts = 0
        self.tries: list[Try] = []
        self.flags: list[str] = []
        self.answer: Answer | None = None
        self.error: bytes | None = None
        """The body of an error, whoever it is from."""
        self.fault: ModelFault | None = None
        self.problem = ""
        self.left = False
        self.complete = False
        """True with the last of the chunks, where that is known before it ends."""
        self._stack = ExitStack()
        self._settled = False

    async def open(self) -> None:
        """Get an answer to begin, or an error to send instead; afterwards `status` and `headers` are set."""
        self.access.enter(self)
        try:
            if self.access.closed:
                raise CutShort("the trial is over")
            await self._open()
        except BaseException:
            self.leave("the call was cut off before it was answered")
            self.close()
            raise

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer, byte for byte. Raises CutShort when the upstream's broke off."""
        if self.error is not None:
            self.settle()
            self.complete = True
            yield self.error
            return
        answer = self.answer
        assert answer is not None, "open() comes first"
        try:
            while True:
                if answer.last_seen:
                    self.settle()
                elif self.access.closed:
                    raise CutShort("the trial is over")
                self.complete = answer.last_seen and not answer.is_stream
                if data := answer.take_ready():
                    yield data
                if self.complete or not await answer.more():
                    break
        except TryFailed as failure:
            self.fault = failure.fault
            self.settle(failure.message)
            raise CutShort(failure.message) from failure
        self.settle()
        if data := answer.take_ready():
            yield data

    def close(self) -> None:
        """Give back every place and connection. A call that was not read to its end is settled as cut off."""
        try:
            self.leave("the client left before the answer had ended")
        finally:
            self.access.leave(self)
            self._stack.close()

    def settle(self, problem: str = "") -> None:
        """Count the call and put it on record, once. Raises what the recorder raises: then nothing more goes out."""
        if not self._settled:
            self._settled = True
            self.problem = problem
            settle(self)

    def leave(self, problem: str) -> None:
        """Settle a call that its caller has ended, unless it is settled."""
        if not self._settled:
            self.left = True
            self.settle(problem)

    async def _open(self) -> None:
        await self.access.slots.acquire()
        self._stack.callback(self.access.slots.release)
        try:
            body = Body(self.raw)
        except BadBody as error:
            self._refuse(400, str(error), "bad_request")
            return
        self.values = body.values
        self.asked = str(body.values.get("model", ""))
        candidates = self.gateway.candidates(self.access, self.asked)
        if not candidates:
            known = ", ".join(model.name for model in self.access.models)
            self._refuse(404, f"there is no model {self.asked[:100]!r} for this trial, only {known}", "model_not_found")
            return
        self._choose(candidates[0], body)
        previous = body.values.get("previous_response_id")
        if previous is not None and str(previous) not in self.access.response_ids:
            self.flags.append("provider state refused: previous_response_id")
            self._refuse(400, "previous_response_id names no answer of this trial", "no_such_response")
            return
        if exceeded := await self._admit():
            self.fault = ModelFault.REFUSED
            self._refuse(403, f"{exceeded.line()}; the trial ends here", "budget_exceeded")
            return
        if self.access.begun is not None:
            self.access.begun(begun(self))
        if failure := await self._ask(candidates, body):
            self._pass_on(failure)

    def _choose(self, model: ModelConfig, body: Body) -> None:
        self.model = model
        self.upstream = self.gateway.upstreams[model.upstream]
        self.tariff = self.gateway.tariff(model)
        self.prepared = prepare(self.operation, body, model)

    async def _admit(self) -> Exceeded | None:
        """Wait for a place in both budgets, and take it. Returns the budget that is used up."""
        if not self.operation.generates:
            return None
        asked = self.prepared.max_tokens
        completion = (_GUESSED_COMPLETION if asked is None else asked) * self.prepared.answers
        estimate = estimated(len(self.raw), completion, self.tariff.amounts)
        purses = (self.access.purse, self.gateway.run_purse)
        while True:
            for purse in purses:
                if exceeded := purse.check():
                    self.access.refused(exceeded)
                    return exceeded
            full = next((purse for purse in purses if not purse.fits(estimate)), None)
            if full is None:
                break
            await full.wait()
        for purse in purses:
            purse.begin(estimate)
        self.reserved = estimate
        return None

    async def _ask(self, candidates: list[ModelConfig], body: Body) -> TryFailed | None:
        """Ask the model, then what it may fall back to. Returns None once an answer has begun."""
        failure: TryFailed | None = None
        for model in candidates:
            if self.operation.protocol not in self.gateway.upstreams[model.upstream].config.protocols:
                text = f"{model.name} cannot be asked by the protocol {self.operation.protocol}"
                failure = failure or TryFailed(ModelFault.REFUSED, text, retried=False)
                continue
            if failure is not None:
                self.flags.append(f"fallback: {candidates[0].name} → {model.name}: {failure.message}")
                self._choose(model, body)
            assert self.upstream is not None
            failure = await self._ask_until_answered(model, self.upstream)
            if failure is None or not failure.retried:
                return failure
        return failure

    async def _ask_until_answered(self, model: ModelConfig, upstream: Upstream) -> TryFailed | None:
        """Try one upstream until it answers or another try makes no sense."""
        tries = 0
        while True:
            began = anyio.current_time()
            try:
                if (closed_s := upstream.breaker.wait_s(began)) > 0:
                    text = (
                        f"{upstream.config.name} has failed too often in a row and is left alone for {closed_s:.0f} s"
                    )
                    raise TryFailed(ModelFault.UNREACHABLE, text, retried=True, wait_s=closed_s)
                self.attempts += 1
                await self._try(model, upstream, again=tries > 0)
                return None
            except TryFailed as caught:
                failure = caught
            tries += 1
            wait_s = self._wait_s(failure, tries, upstream)
            self.tries.append(
                Try(
                    upstream=upstream.config.name,
                    fault=str(failure.fault),
                    message=self.gateway.redactor.text(failure.message),
                    status=failure.status,
                    duration_s=anyio.current_time() - began,
                    waited_s=wait_s or 0.0,
                )
            )
            if wait_s is None:
                return failure
            await self.gateway.sleep(wait_s)

    def _wait_s(self, failure: TryFailed, tries: int, upstream: Upstream) -> float | None:
        """How long to wait before the next try; None when there is none."""
        retries = upstream.config.retries
        if not failure.retried or tries > retries.max_retries:
            return None
        if failure.wait_s is not None and failure.wait_s > retries.max_retry_after_s:
            failure.message += f"; it asks to wait {failure.wait_s:.0f} s"
            return None
        wait_s = delay_s(tries, failure.wait_s, self.gateway.rng, base_s=retries.base_s, cap_s=retries.cap_s)
        if anyio.current_time() + wait_s >= anyio.current_effective_deadline() - _LAST_S:
            failure.message += "; no time is left to try again"
            return None
        return wait_s

    async def _try(self, model: ModelConfig, upstream: Upstream, *, again: bool) -> None:
        """One try, up to the first event or (not streamed) the whole answer. Raises TryFailed."""
        with ExitStack() as stack:
            waiting_since = anyio.current_time()
            await self.gateway.gates[model.name].enter(stack)
            await upstream.gate.enter(stack)
            self.queued_s += anyio.current_time() - waiting_since
            stack.callback(upstream.leave)
            upstream.enter()
            if not again:
                answer = await self._begin(upstream, stack)
            else:
                # It ends before its caller's time does: the caller then learns what is wrong upstream.
                with anyio.CancelScope(deadline=anyio.current_effective_deadline() - _LAST_S) as scope:
                    answer = await self._begin(upstream, stack)
                if scope.cancelled_caught:
                    text = "no time was left for another try to be answered"
                    raise TryFailed(ModelFault.TIMEOUT, text, retried=False)
            self.answer = answer
            self.status = 200
            self._head(answer.opened.headers)
            if not answer.is_stream:
                self.headers["content-length"] = str(len(answer.body))
            self._stack.push(stack.pop_all())

    async def _begin(self, upstream: Upstream, stack: ExitStack) -> Answer:
        operation = self.operation
        opened = await upstream.start(operation.protocol, operation.path, self.passed, self.prepared.raw)
        stack.callback(opened.response.close)
        hide = self.prepared.hide_usage
        answer = Answer(opened, operation, upstream.config, self.gateway.redactor, hide_usage=hide)
        try:
            await answer.begin()
        except TryFailed as failure:
            upstream.failed(failure)
            raise
        return answer

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error of our own, in the protocol's shape."""
        protocol = self.operation.protocol
        self.fault = self.fault or ModelFault.REFUSED
        self.tries.append(Try("gateway", str(self.fault), message, status, 0.0))
        self._fail(status, error_body(protocol, message, kind=error_kind(protocol, status), code=code))
        self.headers["x-proctor-code"] = code

    def _pass_on(self, failure: TryFailed) -> None:
        """Answer with what went wrong upstream: its own words where it had any."""
        self.fault = failure.fault
        protocol = self.operation.protocol
        if failure.body is not None and failure.status is not None:
            self._head(failure.headers)
            self._fail(failure.status, self.gateway.redactor.raw(failure.body))
            return
        status = _STATUS.get(failure.fault, 502)
        # A candidate has no business with the upstream's address; the record says what really happened.
        message = (
            self.gateway.redactor.text(failure.message)
            if self._trusted
            else _IN_GENERAL.get(failure.fault, failure.message)
        )
        self._fail(status, error_body(protocol, message, kind=error_kind(protocol, status), code=str(failure.fault)))
        self.headers["x-proctor-code"] = str(failure.fault)

    def _fail(self, status: int, body: bytes) -> None:
        self._head(self.headers or {"content-type": "application/json"})
        self.status, self.error = status, body
        # Whatever could be tried again has been, here: the official clients heed this header.
        self.headers.setdefault("x-should-retry", "false")
        self.headers["content-length"] = str(len(body))
        self.headers["x-proctor-fault"] = str(self.fault)

    def _head(self, headers: Mapping[str, str]) -> None:
        """The reply's headers: the upstream's without what belongs to its connection, its account or its site."""
        redact = self.gateway.redactor.text
        lowered = ((name.lower(), value) for name, value in headers.items())
        kept = {name: redact(value) for name, value in lowered if name not in _DROPPED}
        kept["x-proctor-attempts"] = str(self.attempts)
        waited_s = self.queued_s + sum(one.duration_s + one.waited_s for one in self.tries)
        kept["x-proctor-waited-s"] = f"{waited_s:.6f}"
        self.headers = kept
