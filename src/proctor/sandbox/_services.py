"""The Edge's own tasks: they outlive a cancellation of its caller, because they do the cleaning up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

import anyio

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus


class Services:
    """A task group in a task of its own.

    In a group of the caller's, a cancel scope around the Edge would cancel these tasks too, and with them the guests'
    channels and the burial of what has ended, before the caller had a chance to end anything in order. They still have
    an owner: leaving the context cancels them and waits.
    """

    tasks: TaskGroup

    async def __aenter__(self) -> Self:
        self._ready = anyio.Event()
        # A plain asyncio task begins outside every cancel scope; anyio has no other way to say so.
        self._host = asyncio.create_task(self._run(), name="proctor-edge-services")
        with anyio.CancelScope(shield=True):
            await self._ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._host

    async def _run(self) -> None:
        async with anyio.create_task_group() as self.tasks:
            self._ready.set()
            await anyio.sleep_forever()


class Started:
    """Passes `started` on and remembers it: an error before is the starter's, an error after is not."""

    def __init__(self, status: TaskStatus[None]) -> None:
        self._status = status
        self.done = False

    def started(self, value: None = None) -> None:
        """What anyio's TaskStatus has."""
        self.done = True
        self._status.started(value)
