"""How the candidate's sandbox is isolated in a run: its runtime, and the least tier that is accepted.

Both are part of the lock, so a resumed or replayed run has the same. Grading rooms are native ones: the examiner
watches them from the machine in ways that only native allows, and the candidate is not alive then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from proctor.common import ConfigError
from proctor.sandbox import SandboxSpec, Tier
from proctor.sandbox.runtimes.capabilities import capabilities_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.sandbox import Runtime

_KEY = "isolation"


@dataclass(frozen=True, slots=True)
class Isolation:
    """Which runtime runs the candidate, and what it has to achieve."""

    runtime: Runtime = "native"
    min_tier: Tier | None = None

    @classmethod
    def parse(cls, runtime: str | None, min_tier: str | None) -> Isolation:
        """From words. Raises ConfigError for a tier that there is not, RefusedError for what no machine can honour."""
        try:
            tier = None if min_tier is None else Tier(min_tier)
        except ValueError as error:
            raise ConfigError(
                f"{min_tier!r} is no tier", field="--min-tier", remedy=f"one of {', '.join(Tier)}"
            ) from error
        made = cls(cast("Runtime", runtime or "native"), tier)
        capabilities_of(made.runtime).refuse(made.of(SandboxSpec()))
        return made

    @classmethod
    def locked(cls, options: Mapping[str, Any]) -> Isolation:
        """From the options of a lock."""
        words = options.get(_KEY, {})
        return cls.parse(words.get("runtime"), words.get("min_tier"))

    def as_options(self) -> dict[str, Any]:
        """For the options of a lock; nothing where nothing was asked for."""
        if self == Isolation():
            return {}
        return {_KEY: {"runtime": self.runtime, "min_tier": None if self.min_tier is None else str(self.min_tier)}}

    def of(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec with this isolation."""
        return replace(spec, runtime=self.runtime, min_tier=self.min_tier)
