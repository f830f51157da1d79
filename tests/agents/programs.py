"""What tests of whole programs share: the command line, a scripted upstream, and an agent that is nothing but data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

_CALLS = r"""
import json, os, pathlib, subprocess, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["BASE"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]

messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    answer = ask(messages)
    messages.append(answer)
    if not answer.get("tool_calls"):
        break
    for call in answer["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
answers = [message for message in messages if message["role"] == "assistant"]
"""
CALLER = """
version = 1
name = "caller"
agent_version = "1"
protocols = ["chat"]
command = ["python3", "${state}/agent.py"]
stdin = "${instruction}"
[environment]
BASE = "${endpoint}"
KEY = "${token}"
MODEL = "${model}"
STATE = "${state}"
[[files]]
path = "${state}/agent.py"
source = "agent.py"
[transcript]
format = "claude"
"""


def write_caller(folder: Path, then: str, recipe: str = CALLER) -> Path:
    """The recipe of an agent that calls its model until it asks for no more commands, and `then` tells of `answers`."""
    (folder / "agent.py").write_text(_CALLS + then)
    (folder / "agent.toml").write_text(recipe)
    return folder / "agent.toml"


@contextmanager
def upstream(answers: Any, folder: Path) -> Iterator[str]:
    """A scripted upstream in a process of its own, playing the answers of a file; gives its base URL."""
    script = folder / "answers.json"
    script.write_text(json.dumps(answers))
    command = [sys.executable, "-m", "proctor.models.scripted", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def proctor(*words: str, home: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """The command as a person would type it, in the folder of the repository."""
    return subprocess.run(
        [sys.executable, "-m", "proctor", *words],
        cwd=ROOT, env={**os.environ, "PROCTOR_HOME": str(home)},
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
