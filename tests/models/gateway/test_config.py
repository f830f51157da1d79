"""A gateway's file: everything it can say, and one clear line for everything that is wrong in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from proctor.common import ConfigError
from proctor.models.gateway import load_gateway_config

if TYPE_CHECKING:
    from pathlib import Path

FULL = """
version = 1
max_parallel = 8
max_request_mb = 4
drain_s = 5.0
price_file = "prices.toml"

[upstreams.main]
base_url = "https://api.example.test/v1/"
protocols = ["chat", "responses"]
api_key_env = "GATEWAY_TEST_KEY"
headers = { "X-Team" = "exams" }
limits = { requests_per_minute = 600, max_concurrent = 20 }
retries = { max_retries = 3, base_s = 1.0, cap_s = 10.0, max_retry_after_s = 60.0 }
timeouts = { connect_s = 2.0, first_byte_s = 30.0, idle_s = 60.0, total_s = 300.0 }
circuit = { failures = 4, open_s = 20.0 }
health = { path = "/healthz", interval_s = 15.0, timeout_s = 2.0 }

[upstreams.local]
base_url = "http://127.0.0.1:8000/v1"
protocols = ["chat"]
api_key_file = "key.txt"

[models.best]
upstream = "main"
id = "best-2026-11-01"
aliases = ["best-*"]
returns = "best-2026-11-01"
fingerprint = "fp_1"
sampling = { temperature = 0.0, top_p = 0.9, max_tokens = 4096 }
max_tokens_field = "max_completion_tokens"
extra_body = { reasoning_effort = "low" }
provider_tools = ["web_search*"]
fallback = ["small"]
limits = { max_concurrent = 4 }

[models.small]
upstream = "local"
id = "small"
sampling = { seed = 1 }
prices = { prompt = 0.1, completion = 0.2, cached = 0.05, cache_write = 0.12 }

[budgets.run]
cost_usd = 100.0
[budgets.trial]
tokens = 500000
calls = 200
"""
PRICES = """
version = 1
[[prices]]
model = "best-*"
since = 2026-11-01
prompt = 2.0
completion = 8.0
cached = 0.5
"""
KEY = "key-in-the-environment-1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GATEWAY_TEST_KEY", KEY)
    (tmp_path / "key.txt").write_text("key-in-a-file-1\n")
    (tmp_path / "prices.toml").write_text(PRICES)
    return tmp_path


def load(folder: Path, text: str):  # type: ignore[no-untyped-def]
    path = folder / "gateway.toml"
    path.write_text(text)
    return load_gateway_config(path)


def test_a_whole_file_is_read_and_its_keys_are_nowhere_but_where_they_are_used(folder: Path) -> None:
    config = load(folder, FULL)
    main, local = config.upstreams["main"], config.upstreams["local"]
    assert (main.base_url, main.key, local.key) == ("https://api.example.test/v1", KEY, "key-in-a-file-1")
    assert main.headers == {"x-team": "exams"}
    assert (main.limits.max_concurrent, main.retries.cap_s, main.circuit.failures) == (20, 10.0, 4)
    assert main.health is not None
    assert main.health.path == "/healthz"
    best = config.models["best"]
    assert (best.id, best.fallback, best.sampling.max_tokens) == ("best-2026-11-01", ("small",), 4096)
    assert config.prices is not None
    assert (config.run_budgets.cost_usd, config.trial_budgets.calls, config.max_request_bytes) == (100.0, 200, 4 << 20)
    for text in (json.dumps(config.as_json()), repr(config)):
        assert KEY not in text
        assert "key-in-a-file-1" not in text
    assert config.digest == load(folder, FULL).digest
    assert config.digest != load(folder, FULL.replace("top_p = 0.9", "top_p = 0.8")).digest


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ("version = 1\nmax", "version = 2\nmax", "version", "1"),
        ("drain_s = 5.0", "drain = 5", "drain", "no such setting"),
        ("drain_s = 5.0", "drain_s = -1", "drain_s", "greater"),
        ('api_key_env = "GATEWAY_TEST_KEY"', 'api_key = "sk"', "upstreams.main.api_key", "must not be in this file"),
        ("GATEWAY_TEST_KEY", "NOT_SET_ANYWHERE", "upstreams.main.api_key_env", "is not set (export the key)"),
        ("key.txt", "none.txt", "upstreams.local.api_key_file", "cannot be read"),
        ("key.txt", "prices.toml", "upstreams.local.api_key_file", "characters that no key has"),
        ('["chat", "responses"]', "[]", "upstreams.main.protocols", "at least 1"),
        ('["chat", "responses"]', '["soap"]', "upstreams.main.protocols.0", "'chat'"),
        ("https://api.example.test/v1/", "ftp://x", "upstreams.main: base_url", "http(s)"),
        ("https://api.example.test/v1/", "https://me:pw@x/v1", "upstreams.main: base_url", "credentials"),
        ('"X-Team"', '"Authorization"', "upstreams.main.headers.Authorization", "set by the gateway itself"),
        ('"exams"', '"a\\nb"', "upstreams.main.headers.X-Team", "not an HTTP header"),
        ("max_concurrent = 20", "max_concurrent = 0", "upstreams.main.limits.max_concurrent", "greater"),
        ('upstream = "local"', 'upstream = "elsewhere"', "models.small.upstream", "one of: main, local"),
        ('fallback = ["small"]', 'fallback = ["best"]', "models.best.fallback", "no other model 'best'"),
        ("temperature = 0.0, top_p", "seed = 3, top_p", "models.best.sampling.seed", "cannot be enforced"),
        ("temperature = 0.0", "temperature = -1.0", "models.best.sampling.temperature", "greater"),
        ('reasoning_effort = "low"', 'tools = []', "models.best.extra_body.tools", "set by the gateway or the agent"),
        ("prompt = 0.1", "prompt = nan", "models.small.prices.prompt", "finite"),
        ("cost_usd = 100.0", "cost_usd = 0", "budgets.run.cost_usd", "greater"),
        ("prices.toml", "no.toml", "no.toml", "cannot be read"),
        ("[upstreams.main]", "[upstreams.main", "gateway.toml", "not readable as TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_a_remedy(folder: Path, old: str, new: str, field: str, words: str) -> None:
    assert old in FULL
    with pytest.raises(ConfigError) as caught:
        load(folder, FULL.replace(old, new, 1))
    line = caught.value.line()
    assert field in line
    assert words in line
    assert line.endswith(")"), "it says what to do"
    assert KEY not in line


def test_a_price_without_a_date_is_no_price(folder: Path) -> None:
    (folder / "prices.toml").write_text(PRICES.replace("since = 2026-11-01\n", ""))
    with pytest.raises(ConfigError, match=r"prices.toml: prices.0.since"):
        load(folder, FULL)
