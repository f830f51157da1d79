"""The simulated user that a task declares in `[proctor.user]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.tasks.model import AnswerRule, SimulatedUser

if TYPE_CHECKING:
    from proctor.tasks.schema import UserTable


def simulated_user(table: UserTable) -> SimulatedUser:
    """The user as a value."""
    rules = tuple(AnswerRule(rule.match, rule.answer, rule.times) for rule in table.rules)
    return SimulatedUser(rules, table.knowledge, table.default, table.max_questions)
