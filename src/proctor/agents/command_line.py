"""The harness of command-line agents: a recipe says what they are, this module starts them in the sandbox.

The agent runs inside, as in real life; the host gives it the toolkit's layers, a state directory of its own, and a
model endpoint whose token is worth nothing elsewhere. What it then says about itself (its transcript) becomes the
trajectory and is marked as such; what the host saw (the command, the model's calls, the disk) is recorded apart.
"""

from __future__ import annotations

import errno
import json
import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from pydantic import BaseModel, ConfigDict

from proctor.agents.contract import AgentResult, HarnessContext, Step, StopReason, ToolCall
from proctor.agents.keepsakes import keep_logs, newest, read_up_to
from proctor.agents.recipe import PLACEHOLDERS, AgentRecipe, LoadedRecipe, check_values, fill
from proctor.agents.steps import acted, parse_options, said
from proctor.agents.tools import describe
from proctor.agents.transcripts import TranscriptError, read_transcript
from proctor.common import ConfigError, InfraError, RefusedError
from proctor.sandbox.contract import FileError, OutputLimit

if TYPE_CHECKING:
    from proctor.sandbox.contract import ExecResult, Layer, Sandbox
    from proctor.sandbox.images.kits import Kit
    from proctor.sandbox.images.store import ImageStore
    from proctor.sandbox.images.tools import Progress

STATE = "/var/lib/proctor-agent"
"""Where an agent keeps its configuration, its transcript and its memory; made for the trial and removed after it."""
_TRANSCRIPT_BYTES = 64 << 20
_OUTPUT = OutputLimit(head_bytes=_TRANSCRIPT_BYTES, tail_bytes=1 << 20)
_COLLECT_S = 60.0
_SHOWN_CHARS = 4000


class Options(BaseModel):
    """What every command-line agent takes."""

    model_config = ConfigDict(extra="forbid")
    memory: str = "empty"
    """`empty`; `image`: what the task's image has at the recipe's memory path is left; or a directory of this machine,
    copied there before the agent starts (its digest is in the lock)."""


class CommandLineAgent:
    """One recipe as a harness."""

    options_model = Options

    def __init__(self, loaded: LoadedRecipe) -> None:
        self.loaded = loaded
        self.name = loaded.recipe.name
        self.version = loaded.recipe.agent_version
        self.needs_model = bool(loaded.recipe.protocols)

    @property
    def protocols(self) -> tuple[str, ...]:
        """What it speaks with the endpoint inside the sandbox."""
        return tuple(self.loaded.recipe.protocols)

    @property
    def memory_mb(self) -> int:
        """Memory for the program itself, as the recipe says."""
        return self.loaded.recipe.memory_mb

    @property
    def injected(self) -> dict[str, str]:
        """Digests, by name, of everything that the recipe brings into a trial: for the lock."""
        facts = {f"recipe/{name}": digest for name, digest in self.loaded.digests.items()}
        if (kit := self.kit) is not None:
            facts["toolkit"] = kit.digest
        return facts

    @property
    def kit(self) -> Kit | None:
        """The packages that it is made of."""
        from proctor.sandbox.images.kits import Kit

        table = self.loaded.recipe.toolkit
        if table is None:
            return None
        contents = self.loaded.contents
        manifest = contents[str(Path(table.lock).with_name("package.json"))] if table.kind == "npm" else b""
        native, executable = tuple(table.native), tuple(table.executable)
        return Kit(self.name, table.kind, contents[table.lock], manifest, native, executable, self._uses_node())

    def _uses_node(self) -> bool:
        return any("${node}" in part for part in self.loaded.recipe.command)

    async def layers(self, store: ImageStore, progress: Progress) -> tuple[Layer, ...]:
        """The toolkit's layers, to be stacked above the task's image; built before any trial's clock starts."""
        from proctor.sandbox.images.kits import kit_layers

        kit = self.kit
        return () if kit is None else await kit_layers(kit, store=store, progress=progress)

    async def probe(self, box: Sandbox) -> str:
        """Show that the agent's programs run in a sandbox that has its layers; what they said of their version.

        Raises InfraError when they do not run, RefusedError when they are another version than the recipe says.
        """
        values = dict.fromkeys(PLACEHOLDERS, "none") | self._places()
        return await probe(self.loaded.recipe, box, values, None)

    async def run(self, context: HarnessContext) -> AgentResult:
        """Prepare, start, wait, collect. Whatever ends the command, its transcript and logs are kept."""
        options = parse_options(Options, self.name, context.options)
        session = _Session(self.loaded, context, self._values(context))
        try:
            await session.prepare(options.memory)
            return await session.act()
        finally:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _COLLECT_S):
                await session.remove_state()

    def _places(self) -> dict[str, Any]:
        from proctor.sandbox.images import kits

        return {
            "state": STATE,
            "toolkit": f"{kits.HOME}/kit/{self.name}",
            "node": kits.NODE,
            "python": kits.PYTHON,
        }

    def _values(self, context: HarnessContext) -> dict[str, Any]:
        """What the recipe's placeholders stand for in this trial."""
        limits = context.limits
        values: dict[str, Any] = self._places() | {
            "instruction": context.instruction,
            "workdir": context.room.workdir,
            "steps": limits.steps,
            "total_s": math.ceil(limits.total_s),
            "tool_call_s": math.ceil(limits.tool_call_s),
            "seed": context.seed,
        }
        if self.needs_model:
            endpoint = context.endpoint
            if endpoint is None:
                raise ConfigError(f"{self.name} needs a model endpoint in its sandbox", field="agent.model",
                                  remedy="give --model")  # fmt: skip
            if not set(self.protocols) & set(endpoint.protocols):
                raise RefusedError(f"{self.name} speaks {' or '.join(self.protocols)}, and the endpoint speaks "
                                   f"{', '.join(endpoint.protocols)}", field="agent.model",
                                   remedy="choose a model whose endpoint does")  # fmt: skip
            values |= {"endpoint": endpoint.base_url, "endpoint_root": endpoint.origin}
            values |= {"token": endpoint.token, "model": endpoint.model}
        check_values(values)
        return values


async def probe(recipe: AgentRecipe, box: Sandbox, values: dict[str, Any], user: str | None) -> str:
    """The agent's programs run here and are what the recipe says, or the trial is refused: that would be our fault, not
    the agent's. Returns what was found of the expected version; empty for a recipe without a probe."""
    if recipe.probe is None:
        return ""
    argv = [fill(part, values) for part in recipe.probe.command]
    env = {name: fill(text, values) for name, text in recipe.environment.items()}
    result = await box.exec(argv, cwd="/", env=env, user=user, timeout_s=recipe.probe.timeout_s)
    printed = result.text + result.error_text
    if not result.ok:
        raise InfraError(f"{recipe.name} does not run in this image: {' '.join(describe(result, 300).split())}",
                         field="agent.probe",
                         remedy=f"proctor doctor --tools --agent {recipe.name} --image REF")  # fmt: skip
    match = re.search(recipe.probe.expect, printed)
    if match is None:
        raise RefusedError(f"{recipe.name} says {printed.strip()[:120]!r}, not {recipe.probe.expect}",
                           field="agent.probe", remedy="put the recipe's version right")  # fmt: skip
    return match.group(0)


class _Session:
    """One start of an agent."""

    def __init__(self, loaded: LoadedRecipe, context: HarnessContext, values: dict[str, Any]) -> None:
        self._loaded = loaded
        self._recipe = loaded.recipe
        self._context = context
        self._values = values
        self._box = context.room.sandbox
        self._environment = {name: self._fill(text) for name, text in self._recipe.environment.items()}
        self._account = context.task.agent_user
        self._probed = ""

    def _fill(self, text: str) -> str:
        return fill(text, self._values)

    async def prepare(self, memory: str) -> None:
        """The state directory, the memory, the files, and the proof that the agent's programs run here."""
        await self._make_state()
        remembered = await self._memory(memory)
        for item in self._recipe.files:
            data = self._loaded.contents[item.source] if item.source else str(item.text).encode()
            if item.template or item.text is not None:
                data = self._fill(data.decode("utf-8")).encode()
            await self._box.write(self._fill(item.path), data, mode=int(item.mode, 8), user=self._account)
        self._probed = await probe(self._recipe, self._box, self._values, self._account)
        facts = {
            "recipe": self._recipe.name,
            "recipe_digest": self._loaded.digest,
            "agent_version": self._recipe.agent_version,
            "probed": self._probed,
            "memory": remembered,
        }
        what = f"{self._recipe.name} {self._recipe.agent_version} in the sandbox; memory: {remembered['from']}"
        self._context.recorder.step(_noted(what, facts))
        self._context.recorder.step(said("user", self._context.instruction))

    async def _make_state(self) -> None:
        try:
            await self._box.mkdir(STATE, mode=0o777)
        except FileError as error:
            if error.errno == errno.EEXIST:
                raise RefusedError(f"the image already has {STATE}", field="environment",
                                   remedy="remove it from the image") from error  # fmt: skip
            raise
        if self._account not in (None, "root", "0"):
            # The mask of the guest may have taken rights away from the directory.
            await self._box.exec(["chmod", "0777", STATE], user="root", cwd="/", timeout_s=10)

    async def _memory(self, wanted: str) -> dict[str, Any]:
        """Lay out what the agent remembers, and say what that is."""
        table = self._recipe.memory
        if table is None:
            if wanted != "empty":
                raise ConfigError(f"{self._recipe.name} has no memory that its recipe knows of",
                                  field="agent.options.memory", remedy="leave it out")  # fmt: skip
            return {"from": "none"}
        path = self._fill(table.path)
        if wanted == "image":
            return {"from": "image", "path": path, "entries": await self._entries(path)}
        if found := await self._entries(path):
            raise RefusedError(f"the image has {found} entries at {path}, so the agent's memory would not be empty",
                               field="agent.options.memory", remedy="say memory=image if that is meant")  # fmt: skip
        if wanted == "empty":
            return {"from": "empty", "path": path}
        source = Path(wanted)
        if not await anyio.Path(source).is_dir():
            raise ConfigError(f"{wanted} is not a directory of this machine", field="agent.options.memory",
                              remedy="empty, image, or a directory")  # fmt: skip
        await self._box.upload(source, path, user=self._account)
        return {"from": wanted, "path": path, "entries": await self._entries(path)}

    async def _entries(self, path: str) -> int:
        try:
            return len(await self._box.list(path))
        except FileError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return 0
            raise

    async def act(self) -> AgentResult:
        """Run the command to its end and read what it left."""
        argv = [self._fill(part) for part in self._recipe.command]
        stdin = self._fill(self._recipe.stdin).encode() if self._recipe.stdin is not None else None
        result: ExecResult | None = None
        try:
            result = await self._context.room.run(
                argv, env=self._environment, stdin=stdin, limit=_OUTPUT, secret=self._values.get("token")
            )
        finally:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _COLLECT_S):
                final = await self._collect(argv, result)
        if result.ok:
            return AgentResult(StopReason.FINISHED, final_message=final)
        end = f"signal {result.signal}" if result.signal is not None else f"exit code {result.exit_code}"
        if result.reason is not None:
            end += f" ({result.reason})"
        said_last = (result.error_text.strip() or result.text.strip()).splitlines()
        detail = f"{self._recipe.name} ended with {end}" + (f": {said_last[-1][:200]}" if said_last else "")
        return AgentResult(StopReason.ERROR, detail, final_message=final)

    async def _collect(self, argv: list[str], result: ExecResult | None) -> str:
        """Logs into the record, the transcript into the trajectory. Returns what the agent said last."""
        recorder = self._context.recorder
        if result is not None:
            recorder.keep("stdout.txt", self._without_token(result.stdout.data))
            recorder.keep("stderr.txt", self._without_token(result.stderr.data))
        for log in self._recipe.logs:
            await keep_logs(self._box, self._fill(log.path), log.name, recorder, self._without_token)
        steps, final, lost = await self._transcript(result)
        if lost:
            recorder.log(f"transcript: {lost}")
        for step in steps:
            step.extra["told_by"] = "agent"
            recorder.step(step)
        if not steps:
            recorder.step(self._seen(argv, result))
        return final

    def _seen(self, argv: list[str], result: ExecResult | None) -> Step:
        """The command itself as a step, where the agent tells nothing of its own."""
        shown = [self._without_token(part.encode()).decode() for part in argv]
        call = ToolCall("command-1", "run", {"argv": shown}, json.dumps({"argv": shown}))
        if result is None:
            call.error = "cut before it ended"
        else:
            output = describe(result, _SHOWN_CHARS).encode("utf-8", "replace")
            call.result, call.duration_s = self._without_token(output).decode("utf-8", "replace"), result.duration_s
        return acted(shlex.join(shown[:1]), [call])

    def _without_token(self, data: bytes) -> bytes:
        """The trial's key is worthless by then; a record that is searched for keys should have none all the same."""
        token = self._values.get("token")
        return data.replace(str(token).encode(), b"[redacted]") if token else data

    async def _transcript(self, result: ExecResult | None) -> tuple[list[Step], str, str]:
        """The steps that the agent tells of, what it said last, and what of its account could not be used."""
        table = self._recipe.transcript
        if table.format == "none":
            return [], "", ""
        if table.path == "stdout":
            data = result.stdout.data if result is not None else b""
        else:
            path = await newest(self._box, self._fill(table.path))
            if path is None:
                return [], "", f"there is no file {self._fill(table.path)}"
            data = await read_up_to(self._box, path, _TRANSCRIPT_BYTES)
        try:
            told = read_transcript(table.format, self._without_token(data))
        except TranscriptError as error:
            return [], "", str(error)
        return told.steps, told.final_message, "; ".join(told.losses)

    async def remove_state(self) -> None:
        """Take away what was brought: it is not the agent's work."""
        try:
            await self._box.remove(STATE, recursive=True)
        except FileError as error:
            if error.errno != errno.ENOENT:
                self._context.recorder.log(f"{STATE} could not be removed: {error}")


def _noted(message: str, facts: dict[str, Any]) -> Step:
    step = said("system", message)
    step.extra.update(facts)
    return step
