"""`proctor plan`: what a question costs, before anything is run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from proctor.analysis.planner import Assumptions, Plan


@click.command()
@click.argument("sides", nargs=-1, metavar="[A[::AGENT] [B[::AGENT]]]")
@click.option("--effect", type=float, metavar="E", help="The difference to be found: 0.03 is three points.")
@click.option("--tasks", type=click.IntRange(1), metavar="N", help="Tasks there are.")
@click.option("--budget", type=float, metavar="USD", help="What may be spent on both agents together.")
@click.option("--attempts", type=click.IntRange(1), multiple=True, default=(1, 2, 4, 10), show_default=True,
              help="Attempts at each task; repeat it to weigh several.")  # fmt: skip
@click.option("--cost-per-trial", type=float, metavar="USD", help="Unknown when it is not given nor in the records.")
@click.option("--between", type=float, metavar="V", help="Variance, over tasks, of the agents' true difference.")
@click.option("--within", type=float, metavar="V", help="Variance of one run's score at a task.")
@click.option("--design-effect", type=float, metavar="D", help="T tasks in clusters are worth T / D alone.")
@click.option("--prevalence", type=float, metavar="R", help="Also: audits to see one bad trial if so many are bad.")
@click.option("--population", type=int, metavar="N", help="Trials that the audit is drawn from. Default: very many.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Of the audit.")
@click.option("--level", type=float, default=0.95, show_default=True, help="Of the comparison.")
@click.option("--power", type=float, default=0.8, show_default=True, help="How surely the difference is to be found.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(*, sides: tuple[str, ...], as_json: bool, **asked: Any) -> None:
    """Plan a comparison of two agents, or an audit: tasks, attempts and cost from a difference, or the other way round.

    With A and B (runs, or agents in them, as for `proctor compare`) variances and cost are taken from their records.

    \b
    proctor plan --effect 0.03
    proctor plan --tasks 200 --cost-per-trial 0.40
    proctor plan --prevalence 0.05 --population 400
    """
    from proctor.analysis import planner

    sized = any(asked[name] is not None for name in ("effect", "tasks", "budget"))
    if not sized and asked["prevalence"] is None:
        raise click.UsageError("give --effect, --tasks or --budget; or --prevalence for an audit")
    assumptions = _assumptions(sides, asked)
    found = planner.Plan(
        effect=asked["effect"],
        tasks=asked["tasks"],
        budget_usd=asked["budget"],
        assumptions=assumptions,
        options=planner.options(
            assumptions,
            sorted(set(asked["attempts"])),
            effect=asked["effect"],
            tasks=asked["tasks"],
            budget_usd=asked["budget"],
        )
        if sized
        else (),
        audit=planner.audits_needed(asked["prevalence"], confidence=asked["confidence"], population=asked["population"])
        if asked["prevalence"] is not None
        else None,
    )
    if as_json:
        from proctor.runs.formats import dump_json

        click.echo(dump_json(found.as_json(), indent=1), nl=False)
        return
    from proctor.runs.table import console

    print_plan(console(), found)


def _assumptions(sides: tuple[str, ...], asked: dict[str, Any]) -> Assumptions:
    """Typical values, or those of two agents' records; what is given on the command line wins."""
    from proctor.analysis import planner
    from proctor.analysis.power import Spread

    alpha = round(1 - asked["level"], 12)
    if sides:
        from proctor.runs.contenders import select

        found = _learned(select(sides).sides, alpha, asked["power"])
    else:
        found = planner.Assumptions(alpha=alpha, power=asked["power"])
    between, within = asked["between"], asked["within"]
    given = [name for name in ("between", "within", "design_effect", "cost_per_trial") if asked[name] is not None]
    old = found.spread
    spread = Spread(
        old.between if between is None else between,
        old.first if within is None else within,
        old.second if within is None else within,
    )
    source = f"{found.source}; as given: {', '.join(given)}" if given else found.source
    cost = found.cost_per_trial if asked["cost_per_trial"] is None else asked["cost_per_trial"]
    return replace(
        found,
        repeats=found.repeats or within is not None,
        spread=spread,
        source=source,
        design_effect=found.design_effect if asked["design_effect"] is None else asked["design_effect"],
        cost_per_trial=cost,
    )


def _learned(sides: dict[str, Any], alpha: float, power: float) -> Assumptions:
    from proctor.analysis import planner
    from proctor.analysis.pairing import pair
    from proctor.common import ConfigError

    if len(sides) != 2:
        raise ConfigError(f"{len(sides)} agents are given", field="A B", remedy="two agents, as RUN::AGENT")
    one, other = sides.values()
    costs = one["cost_usd"].extend(other["cost_usd"]) if one["cost_usd"].len() else other["cost_usd"]
    mean = None if costs.is_null().any() else float(costs.mean())
    source = f"the records of {' and '.join(sides)}"
    return planner.learned(pair(one, other), mean, source, alpha=alpha, power=power)


def print_plan(console: Console, found: Plan) -> None:
    """The options as a table, what they rest on, and the audit in a line."""
    from rich.table import Table
    from rich.text import Text

    assumptions = found.assumptions
    if found.options:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("attempts", "tasks", "trials", "cost", "finds", ""):
            table.add_column(name, justify="right")
        for option in found.options:
            cost = "unknown" if option.cost_usd is None else f"${option.cost_usd:,.2f}"
            effect = "nothing" if option.effect is None else f"{100 * option.effect:.1f} points"
            fits = {True: "", False: "too many", None: "cost unknown"}[option.fits]
            cells = (f"{option.attempts:,}", f"{option.tasks:,}", f"{option.trials:,}", cost, effect, fits)
            table.add_row(*map(Text, cells))
        console.print(table)
        spread = assumptions.spread
        console.print(Text(
            f"two agents, paired by task; level {100 * (1 - assumptions.alpha):g} %, power "
            f"{100 * assumptions.power:g} %; variance {spread.between:.4f} between tasks, {spread.first:.4f} and "
            f"{spread.second:.4f} within, design effect {assumptions.design_effect:.2f}"
        ))  # fmt: skip
        console.print(Text(f"from {assumptions.source}"))
    if found.audit is not None:
        audit = found.audit
        among = f"of {audit.population:,} trials" if audit.population is not None else "trials"
        console.print(Text(
            f"audit {audit.audits:,} {among}, drawn at random, to see a bad one with {100 * audit.confidence:g} % "
            f"probability if {100 * audit.prevalence:g} % are bad ({audit.formula})"
        ))  # fmt: skip
