"""A real inference server behind the gateway: `transformers serve` with a small, randomly initialised model.

No weights are downloaded: model and tokenizer are made here. It needs the packages of the extra `inference`
(some hundred megabytes), in this environment or in that of `$PROCTOR_INFERENCE_PYTHON`:

    PROCTOR_INFERENCE_PYTHON=…/bin/python pytest -m heavy tests/models/gateway/test_real_server.py
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest
from tests.models.gateway.conftest import open_desk

from proctor.models.gateway import Budgets, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

PYTHON = os.environ.get("PROCTOR_INFERENCE_PYTHON", sys.executable)
MAKE = """
import sys
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=letters)
tokenizer.train_from_iterator(["hello world"], trainer)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}assistant:"
fast.save_pretrained(sys.argv[1])
config = LlamaConfig(vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=2048,
    bos_token_id=0, eos_token_id=1, pad_token_id=1)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The base URL of the server, and the name that it knows the model by."""
    found = subprocess.run([PYTHON, "-c", "import torch, transformers, fastapi"], capture_output=True, check=False)
    if found.returncode != 0:
        pytest.skip("no inference server: pip install 'proctor[inference]', or set PROCTOR_INFERENCE_PYTHON")
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    subprocess.run([PYTHON, "-c", MAKE, str(folder)], check=True, env=environment)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = "from transformers.cli.transformers import main; main()"
    command = [PYTHON, "-c", start, "serve", str(folder), "--device", "cpu", "--port", str(port), "--host", "127.0.0.1"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_up(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}/v1", str(folder)
        finally:
            process.terminate()


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        with suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.5)
    raise AssertionError("the server did not come up")


async def test_a_real_server_is_served_counted_and_bounded(server: tuple[str, str]) -> None:
    base_url, name = server

    def real(config: Any) -> Any:
        return replace(config, upstreams={"up": replace(config.upstreams["up"], base_url=base_url)})

    sampling = Sampling(temperature=0.0, max_tokens=12)
    prices = {"prompt": 1.0, "completion": 2.0}
    options: dict[str, Any] = {"id": name, "sampling": sampling, "prices": prices, "budgets": Budgets(calls=5)}
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 500, "temperature": 2}
    async with open_desk([], config=real, **options) as desk:
        client = openai.AsyncOpenAI(base_url=desk.url, api_key=desk.access.token, max_retries=0)
        whole = await client.chat.completions.create(**ask)
        assert whole.usage is not None
        assert whole.usage.completion_tokens <= 12, "the ceiling holds on a real server"
        text = ""
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == whole.choices[0].message.content, "temperature 0 was enforced: the same answer again"
        async with client.responses.stream(model="m", input="hello") as events:
            final = await events.get_final_response()
        assert final.usage is not None
        first, second, third = desk.calls
        assert first.usage == second.usage
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )
        assert third.usage.prompt_tokens == final.usage.input_tokens
        assert all(call.error is None and call.returned_model == name and not call.flags for call in desk.calls)
        assert second.first_token_s is not None
        refused = await desk.post("chat/completions", {**ask, "messages": "nonsense"})
        assert refused.status_code >= 400
        assert desk.calls[3].error
        assert (await desk.post("chat/completions", ask)).status_code == 200
        assert (await desk.post("chat/completions", ask)).status_code == 403, "five calls were the budget"
        await client.close()
