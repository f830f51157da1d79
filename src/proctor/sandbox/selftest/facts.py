"""What the probe reports: `key<TAB>value` lines, in which a key may come more than once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from proctor.common import InfraError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Facts:
    """One report."""

    values: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, report: bytes) -> Self:
        """Read a report. Raises InfraError for one that is not whole: what was not said is not known."""
        values: dict[str, list[str]] = {}
        for line in report.decode("utf-8", "replace").splitlines():
            key, tab, value = line.partition("\t")
            if not tab:
                raise InfraError(f"the probe wrote {line[:80]!r}", field="self_test")
            values.setdefault(key, []).append(value.strip())
        if "end" not in values:
            raise InfraError("the probe's report was cut off", field="self_test")
        return cls({key: tuple(found) for key, found in values.items()})

    def one(self, key: str) -> str:
        """The value of a fact, `?` when it was not reported."""
        return self.values.get(key, ("?",))[0]

    def many(self, key: str) -> tuple[str, ...]:
        """All values of a fact that comes as often as there is something to say."""
        return self.values.get(key, ())

    def group(self, prefix: str) -> dict[str, str]:
        """The facts whose keys begin with `prefix`, without it."""
        return {key[len(prefix) :]: value[0] for key, value in self.values.items() if key.startswith(prefix)}
