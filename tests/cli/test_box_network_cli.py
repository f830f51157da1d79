"""`proctor box`: options of the network, `net`, `expose`, `connect`, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from .test_box_cli import SMALL, home, proctor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("home")]
__all__ = ["home"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A web server on loopback; gives `127.0.0.1:port`."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "page").write_text("content")

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_allowed_hosts_are_reached_and_everything_is_logged(site: str, tmp_path: Path) -> None:
    log = tmp_path / "network.jsonl"
    fetch = "curl -sS http://one.test/page && ! curl -sS http://two.test/ 2>/dev/null"
    options = ("--allow-internal", f"one.test:80={site}", "--network-log", str(log))
    done = proctor("run", *SMALL, *options, "--json", "--", "sh", "-c", fetch)
    answer = json.loads(done.stdout)
    assert answer["result"]["stdout"] == "content"
    assert answer["result"]["exit_code"] == 0
    assert answer["receipt"]["network"] == "allow"
    assert answer["receipt"]["network_decisions"]["requests_allowed"] == 1
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {event["kind"] for event in events} == {"lookup", "request", "connection"}
    assert [event["path"] for event in events if event["kind"] == "request"] == ["/page"]


def test_what_was_refused_is_said_to_the_person() -> None:
    done = proctor("run", *SMALL, "--allow", "one.test", "--", "sh", "-c", "getent hosts two.test; true")
    assert done.returncode == 0
    assert done.stderr == b"proctor: the network refused two.test (unlisted)\n"


def test_other_protocols_are_carried_when_asked_for(site: str) -> None:
    talk = (
        "import socket; s = socket.create_connection(('one.test', 7))\n"
        "s.sendall(b'GET /page\\r\\n\\r\\n'); print(s.recv(99))"
    )
    done = proctor("run", *SMALL, "--allow-internal", f"tcp:one.test:7={site}", "--", "python3", "-c", talk)
    assert b"content" in done.stdout, done.stderr


def test_a_fault_profile_breaks_connections(site: str, tmp_path: Path) -> None:
    profile = tmp_path / "faults.json"
    profile.write_text(json.dumps({"faults": [{"kind": "status", "status": 429, "retry_after_s": 3}]}))
    ask = ("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code} %header{retry-after}", "http://one.test/page")
    done = proctor("run", *SMALL, "--allow-internal", f"one.test:80={site}", "--faults", str(profile), "--", *ask)
    assert done.stdout.startswith(b"429"), done.stderr


def test_the_network_of_a_detached_sandbox(site: str, tmp_path: Path) -> None:
    made = proctor("run", "--detach", *SMALL, "--allow-internal", f"one.test:80={site}", "--", "sleep", "100")
    name = made.stdout.decode().strip()
    try:
        assert proctor("exec", name, "curl", "-sS", "http://one.test/page").stdout == b"content"
        shown = proctor("net", name).stdout.decode()
        assert "one.test; ports 80; internal" in shown
        assert "request one.test:80 GET /page 200 allowed" in shown

        policy = tmp_path / "policy.json"
        policy.write_text(json.dumps({"mode": "none"}))
        refused = proctor("net", name, "--set", str(policy), "--expect", "7")
        assert (refused.returncode, refused.stderr) == (
            5,
            b"proctor: expect: the policy is at version 1, not 7 (read it again and decide anew)\n",
        )
        assert json.loads(proctor("net", name, "--set", str(policy), "--expect", "1", "--json").stdout)["version"] == 2
        assert proctor("exec", name, "curl", "-sS", "http://one.test/page").returncode == 6
    finally:
        proctor("rm", name)


def test_ways_into_a_server_inside() -> None:
    serve = "mkdir /srv/x; echo inside > /srv/x/page; cd /srv/x; exec python3 -m http.server 8000 --bind 127.0.0.1"
    name = proctor("run", "--detach", *SMALL, "--", "sh", "-c", serve).stdout.decode().strip()
    try:
        ready = "until curl -sS -o /dev/null http://127.0.0.1:8000/; do sleep 0.1; done"
        assert proctor("exec", name, "--timeout", "20", "sh", "-c", ready).returncode == 0
        got = proctor("connect", name, "8000", stdin=b"GET /page HTTP/1.0\r\n\r\n")
        assert got.stdout.endswith(b"\r\n\r\ninside\n"), got.stderr
        command = [sys.executable, "-u", "-m", "proctor", "box", "expose", name, "8000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as exposed:
            assert exposed.stdout is not None
            address = exposed.stdout.readline().split()[0]
            with urllib.request.urlopen(f"http://{address}/page", timeout=20) as page:
                assert page.read() == b"inside\n"
            exposed.terminate()
        refused = proctor("connect", name, "8001")
        assert refused.returncode != 0
        assert b"127.0.0.1:8001 inside the sandbox: Connection refused" in refused.stderr
    finally:
        proctor("rm", name)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--allow", "10.0.0.1"), "allow: '10.0.0.1' is neither a host name"),
        (("--allow", "tcp:a.test"), "allow: 'tcp:a.test' names no port"),
        (("--allow", "a.test:x"), "allow: 'a.test:x': 'x' is not a list of ports"),
        (("--allow", "a.test=127.0.0.1"), "allow: 'a.test=127.0.0.1' names an address"),
        (("--allow-internal", "*"), "allow-internal: `*` cannot be internal"),
        (("--allow", "a.test", "--network", "open"), "network: goes with --allow only as none"),
        (("--network", "nosuchfile"), "network: nosuchfile: No such file"),
        (("--faults", "nosuchfile"), "faults: nosuchfile: No such file"),
        (("--secret", "NO_SUCH_NAME@a.test"), "secret: NO_SUCH_NAME is not in the environment"),
        (("--secret", "PATH"), "secret: 'PATH' is not NAME@HOST"),
    ],
)
def test_wrong_options_are_one_line_that_names_them(options: tuple[str, ...], line: str) -> None:
    """Judged before anything is started: in this process, through the command itself."""
    from proctor.cli.box import box
    from proctor.common import ConfigError

    with pytest.raises(ConfigError) as caught:
        box.main(["run", *SMALL, *options, "--", "true"], standalone_mode=False)
    assert caught.value.line().startswith(line)
