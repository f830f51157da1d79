"""Tables and lines for people: the comparison of agents, the matrix of tasks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from proctor.analysis.frame import under
from proctor.runs.outcome import Outcome
from proctor.runs.summary import NOT_RUN, STOPPED, rates_by_task
from proctor.runs.text import percent, safe
from proctor.runs.vouching import NOT_VOUCHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType
    from rich.text import Text

    from proctor.runs.summary import AgentRow, PlannedTrial, RunView

MARKS: dict[str, tuple[str, str]] = {
    Outcome.RESOLVED: ("✓", "green"),
    Outcome.UNRESOLVED: ("✗", "red"),
    Outcome.AGENT_LIMIT: ("L", "yellow"),
    Outcome.DISQUALIFIED: ("D", "magenta"),
    Outcome.INFRA_ERROR: ("I", "cyan"),
    Outcome.VERIFIER_ERROR: ("V", "cyan"),
    Outcome.CANCELLED: ("-", "dim"),
    STOPPED: ("s", "dim"),
    NOT_RUN: ("·", "dim"),
}

MOST_MARKS = 12
"""Attempts that are shown one by one; more than these are counted."""


def console(*, stderr: bool = False) -> Console:
    """The console of the command line. Where there is no terminal, lines are as long as they need to be."""
    from rich.console import Console

    plain = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not plain.is_terminal:
        plain.width = 240
    return plain


def comparison(rows: Sequence[AgentRow]) -> RenderableType:
    """agents x (planned, graded, resolved, rate with interval, how else they ended, excluded by reason)."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("agent", overflow="fold")
    for name in ("planned", "graded", "resolved", "rate", "95 % interval"):
        table.add_column(name, justify="right")
    table.add_column("not resolved", overflow="fold")
    table.add_column("excluded", overflow="fold")
    with_model = any(row.model_calls for row in rows)
    if with_model:
        table.add_column("tokens", justify="right")
        table.add_column("cost", justify="right")
    named = len({row.condition for row in rows}) > 1
    for row in rows:
        cells = [
            f"{row.agent}, {row.condition}" if named else row.agent,
            str(row.planned),
            str(row.graded),
            str(row.resolved),
            percent(row.rate),
            f"{percent(row.low)} .. {percent(row.high)}" if row.rate is not None else "",
            reasons(_failed(row)) or "-",
            reasons(row.excluded) or "-",
        ]
        if with_model:
            cells += _spent(row)
        table.add_row(*map(Text, cells))
    return table


def _spent(row: AgentRow) -> list[str]:
    """Tokens and cost; what is unknown is called so, never zero."""
    if not row.model_calls:
        return ["-", "-"]
    tokens = "unknown" if row.tokens is None else f"{row.tokens:,}"
    return [tokens, "unknown" if row.cost_usd is None else f"${row.cost_usd:.4f}"]


def bounds(rows: Sequence[AgentRow]) -> list[str]:
    """For agents with excluded trials: what the rate could be if those had all failed, or all passed."""
    return [
        f"{_who(row)}: {sum(row.excluded.values())} of {row.planned} planned trials are excluded; counted as failed "
        f"or as resolved, the rate would be {percent(row.worst)} or {percent(row.best)}"
        for row in rows
        if row.excluded
    ]


def weighted(view: RunView) -> list[str]:
    """Where the dataset gives its tasks different weights: each agent's rate by them (repeats averaged first)."""
    weights = {task.name: task.weight for task in view.lock.tasks}
    if len(set(weights.values())) < 2:
        return []
    lines = []
    for agent in view.lock.agents:
        results = [trial.result for trial in view.under(view.lock.condition) if trial.agent == agent.label]
        rates = rates_by_task(result for result in results if result is not None and result.outcome.is_graded)
        total = sum(weights[task] for task in rates)
        if total > 0:
            rate = sum(weights[task] * one for task, one in rates.items()) / total
            lines.append(f"{agent.label}: {percent(rate)} by the dataset's weights")
    return lines


def _who(row: AgentRow) -> str:
    return under(row.agent, row.condition)


def compat(trials: Sequence[PlannedTrial], agents: Sequence[str]) -> list[str]:
    """For agents that were also graded by SWE-bench's own rules: that count, and where the two verdicts differ."""
    lines = []
    for agent in agents:
        both = [trial.result for trial in trials if trial.agent == agent and trial.result is not None]
        both = [result for result in both if result.compat_resolved is not None]
        if both:
            differing = [r.trial_id for r in both if r.compat_resolved != (r.verdict == "resolved")]
            count = sum(bool(result.compat_resolved) for result in both)
            differs = f"; differs from ours in {', '.join(differing)}" if differing else "; the same trials as ours"
            lines.append(f"{agent}: by SWE-bench's own rules {count} of {len(both)} resolved{differs}")
    return lines


def matrix(trials: Sequence[PlannedTrial], agents: Sequence[str]) -> RenderableType:
    """tasks x agents, one mark for each attempt; of many attempts, each mark with how often it occurs."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", overflow="fold")
    for agent in agents:
        table.add_column(agent, justify="center", overflow="fold")
    cells: dict[str, dict[str, list[PlannedTrial]]] = {}
    for trial in trials:
        cells.setdefault(trial.task, {}).setdefault(trial.agent, []).append(trial)
    for task, by_agent in cells.items():
        marks = []
        for agent in agents:
            attempts = sorted(by_agent.get(agent, []), key=lambda trial: trial.attempt)
            marks.append(_marks([trial.status for trial in attempts]))
        table.add_row(Text(task), *marks)
    return table


def _marks(statuses: Sequence[str]) -> Text:
    from rich.text import Text

    if len(statuses) <= MOST_MARKS:
        return Text.assemble(*(MARKS[status] for status in statuses))
    counts = Counter(statuses)
    parts = [((mark, style), f"{counts[name]}") for name, (mark, style) in MARKS.items() if name in counts]
    return Text(" ").join(Text.assemble(*part) for part in parts)


def troubles(trials: Sequence[PlannedTrial], most: int = 10) -> list[str]:
    """Why trials ended outside the denominator: one line for each reason, the `most` frequent ones."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for trial in trials:
        if trial.result is not None and not trial.result.outcome.is_graded:
            reasons.setdefault((trial.status, safe(trial.result.detail)), []).append(trial.id)
    ranked = sorted(reasons.items(), key=lambda item: -len(item[1]))
    lines = []
    for (status, detail), ids in ranked[:most]:
        who = ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more"
        lines.append(f"{status}: {detail} ({who})")
    return [*lines, f"… and {len(ranked) - most} more reasons"] if len(ranked) > most else lines


def legend(trials: Sequence[PlannedTrial]) -> str:
    """What the marks of the matrix mean: only those that occur."""
    present = {trial.status for trial in trials}
    return "  ".join(f"{mark} {name}" for name, (mark, _) in MARKS.items() if name in present)


def print_run(console: Console, view: RunView, *, with_matrix: bool = True) -> None:
    """The whole picture of a run: comparison, denominators, matrix, what cannot be run, the state of the ledger."""
    from rich.text import Text

    agents = [agent.label for agent in view.lock.agents]
    rows = view.rows()
    dataset = view.lock.dataset
    head = f"run {view.lock.run_id}: {dataset.name} {dataset.version}".rstrip()
    plan = f"{len(view.lock.tasks)} tasks x {len(agents)} agents x {view.lock.attempts} attempts"
    if len(view.conditions) > 1:
        plan += f", plain and under {len(view.conditions) - 1} conditions"
    console.print(Text(f"{head}, {plan}", style="bold"))
    if view.lock.parent is not None:
        from proctor.runs.story import parent_line

        console.print(Text(parent_line(view.lock.parent.model_dump()), style="magenta"))
    console.print(comparison(rows))
    for line in (*weighted(view), *bounds(rows), *compat(view.trials, agents)):
        console.print(Text(line))
    if with_matrix and view.trials:
        for condition in view.conditions:
            console.print()
            if len(view.conditions) > 1:
                console.print(Text(condition, style="bold"))
            console.print(matrix(view.under(condition), agents))
        console.print(Text(legend(view.trials), style="dim"))
    for row in view.ledger.of("stopped"):
        left_out = f"{len(row.data['trials'])} planned trials were not started"
        console.print(Text(f"stopped by {row.data['rule']}: {safe(row.data['reason'])}; {left_out}", style="cyan"))
    for line in troubles(view.trials):
        console.print(Text(line, style="cyan"))
    for task in view.lock.unrunnable:
        console.print(Text(f"not runnable here: {task.name}: {task.reason}", style="yellow"))
    print_ledger(console, view)


def print_ledger(console: Console, view: RunView) -> None:
    """One line on the chain: whole with its head, or what is wrong."""
    from rich.text import Text

    if view.damage is None:
        head = view.ledger.head
        console.print(Text(f"ledger: {head.rows} rows, chain whole, head {head.hash}", style="dim"))
        if not view.vouched:
            console.print(Text(NOT_VOUCHED, style="yellow"))
    else:
        console.print(Text(f"ledger: DAMAGED: {view.damage}", style="bold red"))


def reasons(counts: object) -> str:
    """`{"infra_error": 2}` as `2 infra_error`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) if isinstance(counts, dict) else ""


def _failed(row: AgentRow) -> dict[str, int]:
    return {
        reason: count
        for reason, count in row.outcomes.items()
        if reason not in row.excluded and reason != Outcome.RESOLVED
    }
