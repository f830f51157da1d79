"""The gateway: the one way to a model. Who may ask for what, at which budget, and what goes on record."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from random import Random
from typing import TYPE_CHECKING, Any, Self

import anyio

from proctor.common import ConfigError, RefusedError
from proctor.models.gateway.access import Purse, TrialAccess, token_digest
from proctor.models.gateway.calls import Redactor
from proctor.models.gateway.config import Budgets
from proctor.models.gateway.exchange import Exchange
from proctor.models.gateway.prices import Tariff
from proctor.models.gateway.upstream import Gate, Upstream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from proctor.models.gateway.calls import Begun, CallRecord
    from proctor.models.gateway.config import GatewayConfig, ModelConfig
    from proctor.models.gateway.dialects import Operation


class Gateway:
    """Holds the keys, the connections and the budgets of one run.

        async with Gateway(config) as gateway:
            access = gateway.open_trial("t1", models=["name"], record=write)
            ...                     # the trial asks with access.token, at `gateway.app` or by `GatewayTransport`
            access.close()

    `rng` and `sleep` are for tests of the waits between tries.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        secrets: Sequence[str] = (),
        rng: Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.config = config
        self.upstreams = {name: Upstream(upstream) for name, upstream in config.upstreams.items()}
        self.gates = {name: Gate(model.limits) for name, model in config.models.items()}
        self.run_purse = Purse("run", config.run_budgets)
        keys = [upstream.key for upstream in config.upstreams.values() if upstream.key]
        self.redactor = Redactor([*keys, *secrets])
        self.rng = rng or Random()
        self.sleep = sleep
        self.pins: dict[tuple[str, str], str] = {}
        """What each model returned first, as (model, "model" or "fingerprint"): later answers are held against it."""
        self._by_digest: dict[str, TrialAccess] = {}
        self._stack: AsyncExitStack | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for upstream in self.upstreams.values():
                await upstream.open()
                stack.push_async_callback(upstream.close)
            group = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(group.cancel_scope.cancel)
            for upstream in self.upstreams.values():
                group.start_soon(upstream.watch)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *details: object) -> None:
        for access in list(self._by_digest.values()):
            access.close()
        if self._stack is not None:
            await self._stack.aclose()
            self._stack = None

    @property
    def app(self) -> Any:
        """The ASGI application: for a server of its own, or for a sandbox that reaches it by name."""
        from proctor.models.gateway.app import GatewayApp

        return GatewayApp(self)

    def open_trial(
        self,
        trial_id: str,
        *,
        models: Sequence[str],
        record: Callable[[CallRecord], None],
        budgets: Budgets | None = None,
        begun: Callable[[Begun], None] | None = None,
    ) -> TrialAccess:
        """Access for one trial, to these models alone. `record` is called with every call before its answer ends,
        `begun` before it goes upstream.

        What `budgets` leaves open is taken from the configuration. Raises ConfigError for a model that is not
        configured, RefusedError for a budget in dollars where a price is unknown.
        """
        for name in models:
            if name not in self.config.models:
                known = ", ".join(self.config.models)
                raise ConfigError(f"there is no model {name!r} in the gateway's configuration", field="models",
                                  remedy=f"one of: {known}")  # fmt: skip
        own = budgets or Budgets()
        default = self.config.trial_budgets
        effective = Budgets(
            tokens=own.tokens if own.tokens is not None else default.tokens,
            cost_usd=own.cost_usd if own.cost_usd is not None else default.cost_usd,
            calls=own.calls if own.calls is not None else default.calls,
        )
        chosen = [self.config.models[name] for name in models]
        if effective.cost_usd is not None or self.config.run_budgets.cost_usd is not None:
            self._check_priced(chosen)
        access = TrialAccess(
            trial_id=trial_id,
            models=chosen,
            record=record,
            purse=Purse("trial", effective),
            run_purse=self.run_purse,
            slots=anyio.Semaphore(self.config.max_parallel, fast_acquire=True),
            on_close=self._forget,
            begun=begun,
        )
        self._by_digest[token_digest(access.token)] = access
        return access

    def access_of(self, token: str) -> TrialAccess | None:
        """Whose token it is; None for any that is not, or no longer, good."""
        return self._by_digest.get(token_digest(token))

    def exchange(
        self,
        access: TrialAccess,
        operation: Operation,
        raw: bytes,
        headers: Mapping[str, str],
        *,
        trusted: bool = False,
    ) -> Exchange:
        """One call: `await open()` it, then read its `chunks()`, then `close()` it. Only a `trusted` caller is told
        where the upstream is."""
        return Exchange(self, access, operation, raw, headers, trusted=trusted)

    def candidates(self, access: TrialAccess, name: str) -> list[ModelConfig]:
        """The model that a name means for a trial, then what it may fall back to; empty when it means none."""
        found = next((m for m in access.models if m.name == name), None)
        found = found or next((m for m in access.models if m.id == name), None)
        found = found or next((m for m in access.models if any(fnmatchcase(name, a) for a in m.aliases)), None)
        if found is None:
            return []
        return [found, *(self.config.models[other] for other in found.fallback)]

    def tariff(self, model: ModelConfig) -> Tariff:
        """What a model's calls cost today."""
        if model.prices is not None:
            return Tariff(model.prices)
        table = self.config.prices
        price = table.find(model.id, datetime.now(UTC).date()) if table is not None else None
        return Tariff(price.amounts, price.since.isoformat()) if price is not None else Tariff(None)

    def health(self, *, details: bool = False) -> dict[str, Any]:
        """Whether all upstreams are well; with `details` how each of them is."""
        upstreams = {name: upstream.as_json() for name, upstream in self.upstreams.items()}
        well = all(one["circuit"] == "closed" for one in upstreams.values())
        status = {"status": "ok" if well else "degraded"}
        return {**status, "upstreams": upstreams, "trials": len(self._by_digest)} if details else status

    def _check_priced(self, models: Sequence[ModelConfig]) -> None:
        names = {name for model in models for name in (model.name, *model.fallback)}
        for name in sorted(names):
            if self.tariff(self.config.models[name]).amounts is None:
                raise RefusedError(
                    f"the price of {name} is unknown, so a budget in dollars cannot be enforced",
                    field="budgets.cost_usd",
                    remedy="give the model's prices, or leave the budget out",
                )

    def _forget(self, access: TrialAccess) -> None:
        self._by_digest.pop(token_digest(access.token), None)
