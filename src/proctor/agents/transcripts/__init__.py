"""What command-line agents say about themselves, as steps.

    told = read_transcript("codex", data)
    told.steps, told.final_message, told.losses

A transcript comes from the candidate: it may be anything. Whatever is not as it should be is left out and named in
`losses`; only a transcript of which nothing can be used is an error. Usage that an agent claims goes into
`extra["claimed_usage"]`: what was really used is counted at the model endpoint.
"""

from __future__ import annotations

from proctor.agents.transcripts import claude, codex, mini, opencode
from proctor.agents.transcripts.told import MAX_STEPS, Told, TranscriptError

__all__ = ["MAX_STEPS", "Told", "TranscriptError", "read_transcript"]

_READERS = {
    "mini-swe-agent": mini.read,
    "codex": codex.read,
    "claude": claude.read,
    "qwen": claude.read,
    "opencode": opencode.read,
}


def read_transcript(form: str, data: bytes) -> Told:
    """The steps in a transcript of that format. Raises TranscriptError when nothing in it can be used."""
    told = _READERS[form](data)
    if len(told.steps) > MAX_STEPS:
        told.losses.append(f"{len(told.steps) - MAX_STEPS} steps after the first {MAX_STEPS}")
        del told.steps[MAX_STEPS:]
    return told
