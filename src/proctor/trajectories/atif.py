"""ATIF, the Agent Trajectory Interchange Format: v1.8 is written, v1.0 to v1.8 are read.

Every object forbids unknown keys, numbers are finite, step ids are consecutive from 1, an observation names a tool
call of its own step, and an agent step without a model call carries no metrics. The rules are those of the published
v1.8 schema; they are stated once more, with their versions, in docs/design/record.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SchemaVersion = Literal[
    "ATIF-v1.0", "ATIF-v1.1", "ATIF-v1.2", "ATIF-v1.3", "ATIF-v1.4", "ATIF-v1.5", "ATIF-v1.6", "ATIF-v1.7", "ATIF-v1.8"
]
_AUDIO_ALIASES = {
    "audio/mp3": "audio/mpeg",
    "audio/x-wav": "audio/wav",
    "audio/wave": "audio/wav",
    "audio/x-m4a": "audio/mp4",
    "audio/m4a": "audio/mp4",
    "audio/x-aac": "audio/aac",
    "audio/x-flac": "audio/flac",
    "audio/x-aiff": "audio/aiff",
}
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


class _Atif(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ImageSource(_Atif):
    """Where an image is, relative to the trajectory file."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    path: str


class AudioSource(_Atif):
    """Where a sound is, relative to the trajectory file (since v1.8)."""

    media_type: Literal[
        "audio/wav", "audio/mpeg", "audio/mp4", "audio/aac", "audio/ogg", "audio/flac", "audio/webm", "audio/aiff"
    ]
    path: str
    duration_sec: float | None = None

    @field_validator("media_type", mode="before")
    @classmethod
    def _normalise(cls, value: Any) -> Any:
        return _AUDIO_ALIASES.get(value.lower(), value.lower()) if isinstance(value, str) else value


class ContentPart(_Atif):
    """One part of a multimodal message: `text` when it is text, `source` when it is media."""

    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: ImageSource | AudioSource | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "text") != (self.text is not None) or (self.type == "text") == (self.source is not None):
            raise ValueError("`text` belongs to type text, `source` to media, and each is required there")
        wanted = {"image": ImageSource, "audio": AudioSource}.get(self.type)
        if wanted is not None and not isinstance(self.source, wanted):
            raise ValueError(f"the source of an {self.type} part must be an {self.type}")
        return self


Content = str | list[ContentPart]


class ToolCall(_Atif):
    """A tool call with its parsed arguments; what the model really sent is in `extra.raw_arguments`."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class SubagentTrajectoryRef(_Atif):
    """A pointer to another trajectory, by its id in this document or by path."""

    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: dict[str, Any] | None = None


class ObservationResult(_Atif):
    """What one tool call gave back."""

    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[SubagentTrajectoryRef] | None = None
    extra: dict[str, Any] | None = None


class Observation(_Atif):
    """What the environment answered to a step."""

    results: list[ObservationResult]


class Metrics(_Atif):
    """Tokens (`prompt_tokens` includes the cached ones) and cost of a step; absent means unknown."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class Step(_Atif):
    """One step of a trajectory."""

    step_id: Annotated[int, Field(ge=1)]
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: Annotated[int, Field(ge=0)] | None = None
    extra: dict[str, Any] | None = None

    @field_validator("timestamp")
    @classmethod
    def _iso_8601(cls, value: str | None) -> str | None:
        from datetime import datetime

        if value is not None:
            datetime.fromisoformat(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.source != "agent":
            for name in _AGENT_ONLY:
                if getattr(self, name) is not None:
                    raise ValueError(f"step {self.step_id}: `{name}` belongs to agent steps only")
        elif self.llm_call_count == 0 and (self.metrics is not None or self.reasoning_content is not None):
            raise ValueError(f"step {self.step_id}: no model was called, so there can be no metrics and no reasoning")
        calls = {call.tool_call_id for call in self.tool_calls or ()}
        for result in self.observation.results if self.observation else ():
            if result.source_call_id is not None and result.source_call_id not in calls:
                raise ValueError(f"step {self.step_id}: no tool call of this step has the id {result.source_call_id!r}")
        return self


class Agent(_Atif):
    """The agent; `name` and `version` are the harness's."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class FinalMetrics(_Atif):
    """Totals, subagents included; absent means unknown."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: dict[str, Any] | None = None


class Trajectory(_Atif):
    """A whole trajectory document."""

    schema_version: SchemaVersion = "ATIF-v1.8"
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: Agent
    steps: Annotated[list[Step], Field(min_length=1)]
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[Trajectory] | None = None

    @property
    def minor(self) -> int:
        """The minor version: 8 for ATIF-v1.8."""
        return int(self.schema_version.rpartition(".")[2])

    @model_validator(mode="after")
    def _check(self) -> Self:
        for expected, step in enumerate(self.steps, 1):
            if step.step_id != expected:
                raise ValueError(f"step ids must be consecutive from 1: found {step.step_id} where {expected} belongs")
        embedded = [child.trajectory_id for child in self.subagent_trajectories or ()]
        if None in embedded or len(set(embedded)) != len(embedded):
            raise ValueError("every embedded subagent trajectory needs a trajectory_id of its own")
        if self.minor >= 7:
            self._check_references(set(embedded))
        return self

    def _check_references(self, embedded: set[str | None]) -> None:
        # Before v1.7 a reference named a session that was stored elsewhere, so nothing could be resolved here.
        for step in self.steps:
            for result in step.observation.results if step.observation else ():
                for reference in result.subagent_trajectory_ref or ():
                    if reference.trajectory_path is None and reference.trajectory_id not in embedded:
                        raise ValueError(
                            f"step {step.step_id}: a subagent reference can be resolved neither by id nor by path"
                        )


def result_of(call: ToolCall, results: Sequence[ObservationResult], *, alone: bool) -> ObservationResult | None:
    """What a call was answered, of its step's results. Older writers leave the id out where a call is `alone` in its
    step."""
    for result in results:
        if result.source_call_id == call.tool_call_id:
            return result
    return results[0] if alone and len(results) == 1 and results[0].source_call_id is None else None


def text_of(content: Content | None) -> str:
    """A message's text; media by their paths."""
    if isinstance(content, list):
        return "\n".join(part.text if part.text is not None else f"[{part.source.path if part.source else part.type}]"
                         for part in content)  # fmt: skip
    return content or ""


def read_trajectory(path: Path) -> Trajectory:
    """Read and validate an ATIF file of any version. Raises ConfigError naming the place in the file."""
    return parse_trajectory(path.read_bytes(), name=str(path))


def parse_trajectory(content: bytes, *, name: str = "trajectory") -> Trajectory:
    """Validate the bytes of an ATIF document. Raises ConfigError naming the first place that is wrong."""
    import json

    try:
        # Not pydantic's own JSON reader: ours keeps lone surrogates, which tool output may hold.
        return Trajectory.model_validate(json.loads(content))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(first["msg"], field=f"{name}: {place}" if place else name) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", field=name) from error


def dump_trajectory(trajectory: Trajectory) -> bytes:
    """The document as it is stored: absent optional fields left out, ASCII-escaped, one final newline."""
    import json

    value = trajectory.model_dump(mode="python", exclude_none=True)
    return json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n"
