"""The text loop, for models without tool calls: one fenced bash command per turn, a marker line at the end."""

from __future__ import annotations

import json
import re

from pydantic import BaseModel, ConfigDict, Field

from proctor.agents.acting import act
from proctor.agents.contract import AgentResult, HarnessContext, StopReason, ToolCall
from proctor.agents.steps import answered, ask, open_conversation, parse_options, said
from proctor.agents.tools import Toolbox

END_MARKER = "TASK_FINISHED"

SYSTEM_PROMPT = f"""\
You work on a task inside a Linux computer of your own. Nobody answers questions: decide for yourself.
Each of your answers says briefly what you think, and then has exactly one command in a fence:

```bash
ls -la
```

You get its exit code and output. Each command runs in a new shell in the working directory. To put a fence
into a file, open yours with more backticks (````bash). When the task is done and checked, answer without a
command, with a line that says only {END_MARKER}. Only the state of the computer counts, not what you say about it."""

_FENCE = re.compile(r"^(?P<ticks>`{3,})(?:bash|sh|shell)[ \t]*\r?\n(?P<body>.*?)^(?P=ticks)`*[ \t]*\r?$", re.M | re.S)
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.S)


class Options(BaseModel):
    """What `--agent text-loop` takes."""

    model_config = ConfigDict(extra="forbid")
    system_prompt: str = SYSTEM_PROMPT
    max_format_errors: int = Field(default=3, ge=0)
    """Answers in a row with no command, or several, before the harness gives up for the model."""
    max_bad_replies: int = Field(default=3, ge=0)
    """Unusable replies of the endpoint, in a row, before the trial ends with MODEL_ERROR."""
    output_chars: int = Field(default=16_000, ge=200)
    """How much of one command's output the model sees."""


class TextLoop:
    """Ask, run the one command, hand back its output, until the marker line or a limit."""

    name = "text-loop"
    version = "1"
    needs_model = True
    options_model = Options

    async def run(self, context: HarnessContext) -> AgentResult:
        """The loop. Limits are not its business: the model, room and recorder of the context raise them."""
        options = parse_options(Options, self.name, context.options)
        tools = Toolbox(context.room, options.output_chars)
        messages = open_conversation(context, options.system_prompt)
        format_errors = 0
        while True:
            answer = await ask(context, messages, max_bad_replies=options.max_bad_replies)
            commands, ended = parse_answer(answer.text)
            calls = [bash_call(commands[0], turn=len(messages))] if len(commands) == 1 else []
            await act(context, tools, answered(answer, calls))
            if ended:
                return AgentResult(StopReason.FINISHED, final_message=answer.text)

            format_errors = 0 if calls else format_errors + 1
            if format_errors > options.max_format_errors:
                detail = f"{format_errors} answers in a row without exactly one command"
                return AgentResult(StopReason.GAVE_UP, detail, final_message=answer.text)
            reply = str(calls[0].result) if calls else format_error(len(commands))
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": reply}]
            if not calls:
                context.recorder.step(said("user", reply))


def parse_answer(text: str) -> tuple[list[str], bool]:
    """The fenced commands of an answer, and whether it ends the task (marker line, and no command).

    Thoughts between `<think>` tags do not count.
    """
    spoken = _THOUGHT.sub("", text)
    commands = [match["body"].strip("\r\n") for match in _FENCE.finditer(spoken)]
    marked = any(line.strip() == END_MARKER for line in spoken.splitlines())
    return [command for command in commands if command.strip()], marked and not commands


def bash_call(command: str, *, turn: int) -> ToolCall:
    """A command as a call of the bash tool."""
    return ToolCall(f"call-{turn}", "bash", {}, json.dumps({"command": command}, ensure_ascii=False))


def format_error(count: int) -> str:
    """What a model is told whose answer had `count` commands instead of one."""
    found = "no command" if count == 0 else f"{count} commands"
    return (
        f"There was {found} in your answer; exactly one ```bash fence is needed. None was run. "
        f"If the task is done, answer without a command, with a line that says only {END_MARKER}."
    )
