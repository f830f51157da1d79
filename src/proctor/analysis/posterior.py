"""How probable is it that one agent is better, given flat priors? An answer beside the tests, never instead of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Posterior:
    """Probability that the first is better, and the posterior mean of the difference."""

    better: float
    difference: float
    formula: str


def paired(first_only: int, second_only: int, tasks: int) -> Posterior:
    """Tasks counted by who resolved them, with a Dirichlet(1, 1, 1, 1) prior over the four cells.

    Which of two discordant cells is larger depends on nothing else: P = P[Beta(b + 1, c + 1) > 1/2].
    """
    from scipy.stats import beta

    better = float(beta.sf(0.5, first_only + 1, second_only + 1))
    return Posterior(better, (first_only - second_only) / (tasks + 4), "dirichlet-flat-paired")


def independent(first: tuple[int, int], second: tuple[int, int]) -> Posterior:
    """(resolved, tasks) of two agents at *different* tasks of one kind, each with a flat Beta(1, 1) prior."""
    from scipy.integrate import quad
    from scipy.stats import beta

    (k, n), (j, m) = first, second
    one, other = beta(1 + k, 1 + n - k), beta(1 + j, 1 + m - j)
    better, _ = quad(lambda x: float(one.pdf(x) * other.cdf(x)), 0, 1, limit=200)
    return Posterior(float(better), float(one.mean() - other.mean()), "beta-flat-independent")
