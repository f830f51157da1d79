"""Ask-the-user: who answers the tool `ask_user`, and from what.

The simulated user knows what the task's `[proctor.user]` says and nothing else: it sees neither the sandbox nor the
tests. Rules answer by patterns, the same for every agent; a model answers from a text. Question and answer are a tool
call like any other, so they are in the trajectory; how many there were is in the result.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, InfraError
from proctor.models.contract import ModelError

if TYPE_CHECKING:
    from proctor.agents.contract import HarnessContext, ToolCall
    from proctor.models.contract import ModelClient
    from proctor.tasks.model import SimulatedUser

_PROMPT = Path(__file__).parent / "assets" / "simulated-user" / "1" / "system.md"


class OutOfQuestions(Exception):
    """The user answers no more questions; the message says so."""


class UserDesk:
    """The user of one trial. Asked one question at a time."""

    def __init__(self, user: SimulatedUser, model: ModelClient | None = None) -> None:
        self.asked = 0
        self._user = user
        self._model = model
        self._used = [0] * len(user.rules)
        self._talk: list[dict[str, Any]] = []

    @classmethod
    def of(cls, context: HarnessContext, *, wanted: bool) -> UserDesk | None:
        """The user of the context's task; None when none is wanted, or the task has none.

        Raises ConfigError when the user is to be played by a model and none is given.
        """
        user = context.task.user if wanted else None
        if user is None:
            return None
        if user.knowledge is not None and context.user_model is None:
            raise ConfigError(f"the user of {context.task.name} is played by a model",
                              field="agent.options.user_model", remedy="give NAME@URL or a model file")  # fmt: skip
        return cls(user, context.user_model if user.knowledge is not None else None)

    async def answer(self, question: str, call: ToolCall) -> str:
        """The user's answer; who gave it is noted in the call. Raises OutOfQuestions, and InfraError when the model
        that plays the user gives none: that must not be the agent's fault."""
        if self.asked >= self._user.max_questions:
            raise OutOfQuestions(f"no more than {self._user.max_questions} questions are answered; decide for yourself")
        self.asked += 1
        if self._model is not None:
            return await self._answer_by_model(self._model, question, call)
        for number, rule in enumerate(self._user.rules):
            spent = rule.times is not None and self._used[number] >= rule.times
            if not spent and re.search(rule.match, question):
                self._used[number] += 1
                call.extra.update(answered_by="rules", rule=number + 1)
                return rule.answer
        call.extra.update(answered_by="rules", rule=None)
        return self._user.default

    async def _answer_by_model(self, model: ModelClient, question: str, call: ToolCall) -> str:
        prompt = _PROMPT.read_text(encoding="utf-8").replace("${knowledge}", self._user.knowledge or "")
        self._talk.append({"role": "user", "content": question})
        try:
            answer = await model.complete([{"role": "system", "content": prompt}, *self._talk])
        except ModelError as error:
            raise InfraError(f"the model that plays the user gave no answer: {error.line()}", field="user_model",
                             remedy="see whether its endpoint works") from error  # fmt: skip
        said = answer.text.strip() or self._user.default
        self._talk.append({"role": "assistant", "content": said})
        usage = {name: getattr(answer.usage, name) for name in answer.usage.__slots__}
        call.extra.update(
            answered_by="model",
            model=answer.returned_model or answer.requested_model,
            usage={name: value for name, value in usage.items() if value is not None},
        )
        return said
