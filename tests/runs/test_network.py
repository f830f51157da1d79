"""The network of a run: none unless it is allowed, by phase, on record, and made to fail on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.toys import make_toy

from proctor.common import ConfigError, RefusedError
from proctor.runs.formats import NetworkLine, ReceiptFile, RunLock, load
from proctor.runs.lock import differences, make_lock
from proctor.runs.network import NetworkGrant
from proctor.runs.record import read_lines
from proctor.runs.request import Request, plan_again, plan_request
from proctor.sandbox.net import NetworkEvent, NetworkPolicy, Rule
from proctor.tasks.network import PhaseNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOLVE = (
    "#!/bin/sh\ncurl -sS -m 10 http://answers.test/answer > /app/answer.txt\ncurl -sS -m 5 http://other.test/\ntrue\n"
)
TEST = """\
#!/bin/sh
mkdir -p /logs/verifier
expected=$(curl -sS -m 10 http://answers.test/expected)
if [ "$(cat /app/answer.txt)" = "$expected" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def make_asking(folder: Path, name: str, hosts: str = '["answers.test"]') -> Path:
    root = make_toy(folder, name, solve=SOLVE, test=TEST)
    toml = (root / "task.toml").read_text()
    (root / "task.toml").write_text(
        toml.replace('network_mode = "no-network"', f'network_mode = "allowlist"\nallowed_hosts = {hosts}')
    )
    return root


@pytest.fixture
def site() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"42")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def network_lines(trial: Path) -> list[NetworkLine]:
    return [NetworkLine.model_validate(line) for line in read_lines(trial / "network.jsonl")]


def write_policy(path: Path, where: str) -> Path:
    rule = {"host": "answers.test", "ports": [80], "internal": True, "target": where}
    path.write_text(json.dumps({"mode": "allow", "rules": [rule]}))
    return path


def test_a_network_is_denied_unless_the_run_allows_it(tmp_path: Path) -> None:
    root = make_asking(tmp_path, "asking")
    with pytest.raises(RefusedError, match=r"--allow-network"):
        plan_request(Request(sources=(str(root),), agents=("oracle",)))
    plan = plan_request(Request(sources=(str(root),), agents=("oracle",), allow_network="asked"))
    lock = make_lock(plan, {})
    assert lock.network == NetworkPolicy("allow", (Rule("*"),)).as_json()
    assert any("network: agent allowlist" in note for note in lock.tasks[0].notes)
    again = plan_again(RunLock.model_validate(lock.model_dump()))
    assert again.network == plan.network
    without = lock.model_copy(update={"network": None})
    assert any(line.startswith("network:") for line in differences(lock, without))


def test_a_ceiling_bounds_what_tasks_ask_for(tmp_path: Path) -> None:
    rules = [{"host": "a.test"}, {"host": "*.b.test", "ports": [443]}, {"host": "x.c.test", "internal": True}]
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"mode": "allow", "rules": rules}))
    grant = NetworkGrant.parse(str(file))
    assert grant.policy(PhaseNetwork("public")) == grant.ceiling
    asked = ("A.test", "y.b.test", "*.c.test", "*.b.test", "other.test")
    got = grant.policy(PhaseNetwork("allowlist", asked))
    assert [(rule.host, rule.ports, rule.internal) for rule in got.rules] == [
        ("a.test", (80, 443), False),
        ("y.b.test", (443,), False),
        ("x.c.test", (80, 443), True),
        ("*.b.test", (443,), False),
    ]
    assert grant.policy(PhaseNetwork("allowlist", ("other.test",))).mode == "none"
    for content in ('{"mode": "open"}', '{"mode": "allow", "rules": [{"host": "10.0.0.1"}]}', "nonsense"):
        file.write_text(content)
        with pytest.raises(ConfigError):
            NetworkGrant.parse(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        NetworkGrant.parse(str(tmp_path / "missing"))


def test_faults_without_a_network_are_refused(tmp_path: Path) -> None:
    profile = tmp_path / "faults.json"
    profile.write_text(json.dumps({"name": "slow", "faults": [{"kind": "delay", "ms": 10}]}))
    toy = make_toy(tmp_path, "toy")
    with pytest.raises(ConfigError, match="no agent's sandbox of this run has a network"):
        plan_request(Request(sources=(str(toy),), agents=("oracle",), faults=(str(profile),)))
    asking = make_asking(tmp_path, "asking")
    plan = plan_request(
        Request(sources=(str(asking),), agents=("oracle",), faults=(str(profile),), allow_network="asked")
    )
    assert [condition.name for condition in plan.conditions] == ["plain", "faults-slow"]
    lock = make_lock(plan, {})
    assert lock.conditions[0].network_faults == {
        "format": "proctor.faults/1",
        "name": "slow",
        "seed": 0,
        "faults": [{"kind": "delay", "ms": 10.0}],
    }
    assert plan_again(lock).conditions == plan.conditions


@pytest.mark.sandbox
def test_each_phase_has_its_network_and_everything_is_on_record(site: str, tmp_path: Path) -> None:
    make_asking(tmp_path / "tasks", "asking")
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps({"name": "down", "faults": [{"kind": "status", "status": 503}]}))
    policy = write_policy(tmp_path / "policy.json", site)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "proctor", "run", tmp_path / "tasks", "--agent", "oracle", "-o", run, "--json"]
    command += ["--allow-network", policy, "--faults", faults]
    environment = os.environ | {"PROCTOR_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

    plain = run / "trials" / "asking@oracle@1"
    events = network_lines(plain)
    asked = [(one.phase, one.name, one.path, one.decision) for one in events if one.kind == "request"]
    assert asked == [
        ("agent", "answers.test", "/answer", "allowed"),
        ("grading", "answers.test", "/expected", "allowed"),
    ]
    refused = {one.name for one in events if one.kind == "lookup" and one.reason == "unlisted"}
    assert refused == {"other.test"}
    assert [one.type for one in events if one.kind == "policy" and one.phase == "collection"] == ["none"]
    receipts = load(ReceiptFile, plain / "receipt.json")
    assert receipts.agent is not None
    assert receipts.agent["network"] == receipts.grading[0]["network"] == "allow"
    assert receipts.agent["network_decisions"]["requests_allowed"] == 1
    assert json.loads((plain / "result.json").read_text())["outcome"] == "resolved"

    shown = subprocess.run([*command[:3], "show", run, "asking@oracle@1"], capture_output=True, text=True, check=False)
    assert "connections: answers.test x1; " in shown.stdout
    assert "not let through: lookup: unlisted x" in shown.stdout

    broken = run / "trials" / "asking@oracle@1@faults-down"
    assert json.loads((broken / "result.json").read_text())["outcome"] == "unresolved"
    faulty = [one for one in network_lines(broken) if one.kind == "request"]
    assert [(one.phase, one.status, one.fault) for one in faulty] == [
        ("agent", 503, "status 503"),
        ("grading", 200, ""),
    ]


_events = st.builds(
    NetworkEvent,
    kind=st.sampled_from(["lookup", "connection", "request", "policy", "dropped"]),
    at=st.floats(0, 1e10),
    decision=st.sampled_from(["allowed", "refused", "failed"]),
    name=st.text(max_size=20),
    path=st.text(max_size=20),
    port=st.none() | st.integers(1, 65535),
    sni=st.none() | st.text(min_size=1, max_size=5),
    status=st.none() | st.integers(100, 599),
    sent=st.integers(0, 1 << 40),
    duration_s=st.none() | st.floats(0, 1e6),
    secrets=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
    service=st.booleans(),
    count=st.integers(1, 1000),
)


@given(_events)
def test_every_event_is_a_line_of_the_record(event: NetworkEvent) -> None:
    line = NetworkLine.model_validate(json.loads(json.dumps({"v": 1, **event.as_json()})))
    for name in ("kind", "name", "path", "port", "sni", "status", "sent", "count", "service"):
        assert getattr(line, name) == getattr(event, name)
    assert tuple(line.secrets) == event.secrets


@pytest.mark.sandbox
@pytest.mark.data
@pytest.mark.heavy
def test_a_public_task_that_needs_a_registry_is_resolved_with_it(shared_data: Path, tmp_path: Path) -> None:
    """`kv-store-grpc` installs packages in both phases. The registry is this machine's own, if it is reached."""
    import ssl
    from urllib.parse import urljoin

    from tests.sandbox.net.test_registries import fetch, python_index, rule_for

    index = python_index()
    page_url = urljoin(index.rstrip("/") + "/", "six/")
    files = urljoin(page_url, fetch(page_url).partition('href="')[2].partition('"')[0])
    bundle = ssl.get_default_verify_paths().cafile
    trust = open(bundle).read() if bundle else None  # noqa: SIM115
    policy = NetworkPolicy("allow", (rule_for(index), rule_for(files)), trust)
    (tmp_path / "policy.json").write_text(json.dumps(policy.as_json()))
    (tmp_path / "kv").symlink_to(shared_data / "harbor" / "kv-store-grpc")
    entry = '[[tasks]]\npath = "kv"\nproctor = { carry = "live" }\n'
    (tmp_path / "dataset.toml").write_text(f'[dataset]\nname = "kv"\nversion = "1"\n{entry}')
    command = [sys.executable, "-m", "proctor", "run", tmp_path / "dataset.toml", "--agent", "oracle", "--json"]
    command += ["--allow-network", tmp_path / "policy.json", "-o", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["resolved"] for row in json.loads(done.stdout)["agents"]] == [1], done.stdout
