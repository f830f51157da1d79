"""What a number needs to be computed again: inputs by digest, the formula by id, seed, level, version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMULAS: Mapping[str, str] = {
    "wilson": "score interval, (k + z²/2 ± z sqrt(k(n-k)/n + z²/4)) / (n + z²); n tasks, k the sum of their mean "
    "results (Wilson 1927)",
    "wilson/effective": "the same with n replaced by the effective number of tasks, p(1-p)/V (z/t(C-1))², V the "
    "cluster-robust variance of the weighted mean; at most Kish's number, and the number of clusters when p is 0 or 1 "
    "(Korn and Graubard 1998)",
    "clopper-pearson": "exact binomial interval from quantiles of the beta distribution (Clopper and Pearson 1934)",
    "clopper-pearson/effective": "the same for an effective number of tasks (Korn and Graubard 1998)",
    "t/population": "m ± t(T-1) sd(m_i)/sqrt(T) over task means m_i (Miller 2024, arXiv 2411.00640)",
    "t/cluster": "m ± t(C-1) sqrt(C/(C-1)) sqrt(sum over clusters of (sum of m_i - m)²)/T (Miller 2024)",
    "t/rerun": "m ± t(N-T) sqrt(MSW sum(1/K_i))/T: the same tasks run again; with K attempts each, sqrt(MSW/(TK))",
    "t/paired-cluster": "t/cluster of the differences within task",
    "deff": "squared cluster-robust error without the factor C/(C-1), over the naive variance (ddof 0) / T",
    "icc": "one-way random effects, (MSB-MSW)/(MSB+(n0-1)MSW) and (MSB-MSW)/MSB (Shrout and Fleiss 1979)",
    "pass@k": "mean over tasks of 1 - C(n-c,k)/C(n,k); no value for k > n (Chen et al. 2021, arXiv 2107.03374)",
    "pass^k": "mean over tasks of C(c,k)/C(n,k); no value for k > n (Yao et al. 2024, arXiv 2406.12045)",
    "bootstrap/cluster": "percentiles over resamples of whole clusters, drawn with replacement",
    "newcombe": "difference of two independent rates from their own intervals (Newcombe 1998, method 10)",
    "newcombe/standardised": "the same, public tasks weighted to the difficulties of the held-out ones",
    "fieller/cluster": "ratio of mean spending to success rate by Fieller's theorem, t(C-1), cluster-robust",
    "none/one-cluster": "no interval: everything belongs to one cluster",
    "agresti-min": "paired difference with half a pair added to each outcome (Agresti and Min 2005)",
    "bounds": "every excluded trial counted as failed, or as resolved, over planned tasks, repeats averaged first",
}
"""What each formula id means, and where it is from."""


@dataclass(frozen=True, slots=True)
class Input:
    """One thing that trials were read from.

    `digest` is the head of the ledger for a run (it covers every planned trial and the digest of every record), the
    digest of the bytes for a Parquet file. `lock` is the digest of `run.json`, `vouched` whether the ledger names it
    (those of earlier versions do not). `damage` says what is wrong with ledger or lock, if anything is.
    """

    kind: Literal["run", "parquet"]
    name: str
    path: str
    digest: str
    trials: int
    lock: str | None = None
    vouched: bool = True
    damage: str | None = None
    unrunnable: int = 0
    """Tasks of the dataset that could not be run there at all; their trials are `unrunnable`."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a set of numbers was computed. `formulas` explains every formula id that occurs beside them."""

    version: str
    inputs: tuple[Input, ...]
    level: float
    seed: int
    resamples: int
    formulas: Mapping[str, str] = field(default_factory=dict)
