"""`proctor box` as a user types it."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox import Edge

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.sandbox

SMALL = ("--memory", "64", "--disk", "16", "--pids", "32")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of its own that shares the images of the session."""
    monkeypatch.setenv("PROCTOR_IMAGES", str(Edge()._images._open().root))
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def proctor(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "proctor", "box", *arguments], input=stdin, capture_output=True, timeout=60, check=False
    )


@pytest.fixture
def detached(home: Path):  # type: ignore[no-untyped-def]
    """A sandbox of a background Edge, ended whatever the test does."""
    made = proctor("run", "--detach", *SMALL, "--label", "a=b")
    assert made.returncode == 0, made.stderr
    yield made.stdout.decode().strip()
    proctor("rm", "--all")


@pytest.mark.usefixtures("home")
class TestRun:
    def test_output_and_exit_code_are_the_commands_own(self) -> None:
        done = proctor("run", *SMALL, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
        assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 7)

    def test_a_time_out_is_124(self) -> None:
        done = proctor("run", *SMALL, "--timeout", "0.2", "--", "sleep", "100")
        assert (done.returncode, done.stderr) == (124, b"proctor: the command was ended: EXEC_TIMEOUT\n")

    def test_a_signal_is_128_and_more(self) -> None:
        assert proctor("run", *SMALL, "--", "sh", "-c", "kill -TERM $$").returncode == 143

    def test_options_of_the_command_are_the_commands(self) -> None:
        assert proctor("run", *SMALL, "ls", "--version").stdout.startswith(b"ls (GNU")

    def test_stdin_is_given_when_asked_for(self) -> None:
        assert proctor("run", *SMALL, "-i", "--", "tr", "a", "b", stdin=b"banana").stdout == b"bbnbnb"

    def test_json_has_result_and_receipt(self) -> None:
        done = json.loads(proctor("run", *SMALL, "--json", "--", "echo", "hi").stdout)
        assert done["result"]["stdout"] == "hi\n"
        assert done["receipt"]["end_reason"] == "CLOSED"
        assert done["receipt"]["limits"]["memory_mb"] == 64

    def test_a_volume_is_read_only(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("content")
        shown = proctor("run", *SMALL, "-v", f"{tmp_path}:/data:ro", "--", "cat", "/data/file")
        assert shown.stdout == b"content"
        assert proctor("run", *SMALL, "-v", f"{tmp_path}:/data", "--", "touch", "/data/x").returncode == 1

    @pytest.mark.parametrize(
        ("arguments", "code", "line"),
        [
            (("run", "-v", "/etc:/data:rw", "--", "true"), 4, b"volume: '/etc:/data:rw': mounts are read-only"),
            (("run", "-v", "/no/such:/data", "--", "true"), 4, b"volume: /no/such does not exist"),
            (("run", "-e", "NAME", "--", "true"), 4, b"env: 'NAME' is not NAME=VALUE"),
            (("run",), 4, b"command: no command given"),
            (("run", "--memory", "99999999", "--", "true"), 5, b"resources.memory_mb: does not fit on this machine"),
            (("exec", "nonsense", "true"), 4, b"sandbox: no living sandbox 'nonsense'"),
            (("rm",), 4, b"sandboxes: no sandbox given"),
        ],
    )
    def test_an_error_is_one_line(self, arguments: tuple[str, ...], code: int, line: bytes) -> None:
        done = proctor(*arguments)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith(b"proctor: " + line), done.stderr
        assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, b"proctor: interrupted"), (signal.SIGTERM, 143, b"")],
)
def test_a_signal_ends_the_sandbox(home: Path, number: signal.Signals, code: int, line: bytes) -> None:
    client = subprocess.Popen(
        [sys.executable, "-m", "proctor", "box", "run", *SMALL, "--", "sh", "-c", "echo up; sleep 1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    client.send_signal(number)
    _, errors = client.communicate(timeout=20)
    assert (client.returncode, errors.strip()) == (code, line)
    assert [path.name for path in (home / "edges").iterdir()] == ["lock"]


class TestDetached:
    def test_it_outlives_the_command_line_and_keeps_its_disk(self, detached: str) -> None:
        assert proctor("exec", detached, "--", "sh", "-c", "echo kept > /root/f; exit 3").returncode == 3
        assert proctor("exec", detached[-6:], "cat", "/root/f").stdout == b"kept\n"

    def test_one_that_cannot_outlive_its_background_process_says_why(self, home: Path) -> None:
        policy = home.parent / "policy.json"
        policy.write_text('{"mode": "allow", "rules": [{"host": "files.example", "methods": ["GET"]}]}')
        made = proctor("run", "--detach", *SMALL, "--network", str(policy))
        proctor("rm", "--all")
        note = b"note: this sandbox ends with its background process: methods and paths"
        assert (made.returncode, made.stderr[: len(note)]) == (0, note)

    def test_ls_shows_it_with_its_labels(self, detached: str) -> None:
        (row,) = json.loads(proctor("ls", "--json").stdout)
        assert (row["sandbox"], row["state"], row["detached"], row["labels"]) == (detached, "CREATED", True, {"a": "b"})
        assert detached in proctor("ls").stdout.decode()

    def test_exec_streams_and_takes_stdin(self, detached: str) -> None:
        assert proctor("exec", "-i", detached, "cat", stdin=b"x" * 300_000).stdout == b"x" * 300_000

    def test_exec_times_out(self, detached: str) -> None:
        done = proctor("exec", "--timeout", "0.2", detached, "--", "sh", "-c", "echo before; sleep 100")
        assert (done.returncode, done.stdout) == (124, b"before\n")

    def test_rm_ends_it_and_its_edge(self, detached: str, home: Path) -> None:
        assert proctor("rm", detached).stdout.decode().strip() == detached
        for _ in range(100):
            if [path.name for path in (home / "edges").iterdir()] == ["lock"]:
                break
            time.sleep(0.05)
        assert [path.name for path in (home / "edges").iterdir()] == ["lock"]
        assert json.loads(proctor("ls", "--json").stdout) == []

    def test_the_socket_is_for_its_owner_only(self, detached: str, home: Path) -> None:
        (socket,) = home.glob("edges/*/control.sock")
        assert socket.stat().st_mode & 0o777 == 0o600
        assert socket.parent.stat().st_mode & 0o077 == 0
        assert detached

    def test_a_client_that_goes_away_takes_its_command_with_it(self, detached: str) -> None:
        client = subprocess.Popen([sys.executable, "-m", "proctor", "box", "exec", detached, "sleep", "1000"])
        for _ in range(100):
            if proctor("exec", detached, "pgrep", "-x", "sleep").returncode == 0:
                break
        client.kill()
        client.wait()
        for _ in range(100):
            if proctor("exec", detached, "pgrep", "-x", "sleep").returncode == 1:
                return
        pytest.fail("the command lives on")

    def test_a_shell_without_a_terminal_reads_commands(self, detached: str) -> None:
        done = proctor("shell", detached, stdin=b"echo $((6*7))\nexit 5\n")
        assert (done.stdout, done.returncode) == (b"42\n", 5)

    def test_a_shell_on_a_terminal_has_a_terminal(self, detached: str) -> None:
        assert "terminal yes" in talk(detached, b"test -t 0 && echo terminal yes; exit\n")


class TestCommandsThatRunOn:
    def test_one_is_listed_read_from_any_offset_and_come_to_again(self, detached: str) -> None:
        loop = "echo begin; while ! test -e /tmp/end; do sleep 0.05; done; echo error >&2; exit 3"
        number = proctor("exec", "--detach", detached, "--", "sh", "-c", loop).stdout.decode().strip()
        (row,) = json.loads(proctor("ps", "--json", detached).stdout)
        assert (row["exec_id"], row["running"], row["argv"][0]) == (int(number), True, "sh")
        assert "running" in proctor("ps", detached).stdout.decode()
        for _ in range(50):
            if proctor("logs", detached, number).stdout == b"begin\n":
                break
        assert proctor("logs", "--since", "3", detached, number).stdout == b"in\n"
        piece = json.loads(proctor("logs", "--json", "--since", "1", detached, number).stdout)
        assert piece == {"stream": "stdout", "offset": 1, "text": "egin\n"}
        attached = subprocess.Popen(
            [sys.executable, "-m", "proctor", "box", "attach", detached, number],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert proctor("exec", detached, "touch", "/tmp/end").returncode == 0
        output, errors = attached.communicate(timeout=20)
        assert (output, errors, attached.returncode) == (b"begin\n", b"error\n", 3)
        assert "exit 3" in proctor("ps", detached).stdout.decode()

    def test_it_outlives_its_background_edge_which_the_next_command_replaces(self, detached: str) -> None:
        assert proctor("exec", detached, "--", "sh", "-c", "echo kept > /root/f").returncode == 0
        number = proctor("exec", "-d", detached, "--", "sh", "-c", "sleep 1; echo done").stdout.decode().strip()
        (row,) = json.loads(proctor("ls", "--json").stdout)
        os.kill(row["owner"], signal.SIGKILL)
        for _ in range(100):
            (row,) = json.loads(proctor("ls", "--json").stdout)
            if not row["owner"]:
                break
        assert "waiting" in proctor("ls").stdout.decode()
        assert proctor("exec", detached, "cat", "/root/f").stdout == b"kept\n"
        assert proctor("logs", "--follow", detached, number).stdout == b"done\n"
        (row,) = json.loads(proctor("ls", "--json").stdout)
        assert row["owner"]

    def test_a_request_id_is_one_command(self, detached: str) -> None:
        for _ in range(2):
            asked = proctor("exec", "--request-id", "r", detached, "--", "sh", "-c", "echo x | tee -a /root/x")
            assert asked.stdout == b"x\n"
        assert proctor("exec", detached, "cat", "/root/x").stdout == b"x\n"

    def test_stats_and_metrics(self, detached: str) -> None:
        used = json.loads(proctor("stats", "--json", detached).stdout)
        assert used["pids"] >= 1
        assert "MB" in proctor("stats", detached).stdout.decode()
        page = proctor("metrics").stdout.decode()
        assert f'proctor_sandbox_alive{{edge="{detached.rpartition("-")[0]}"}} 1.0' in page

    def test_unknown_commands_are_refused_in_one_line(self, detached: str) -> None:
        done = proctor("logs", detached, "99")
        assert (done.returncode, done.stderr.count(b"\n")) == (4, 1)
        assert b"exec: there is no command 99" in done.stderr


def test_metrics_are_served_on_the_loopback(home: Path) -> None:
    import urllib.request

    server = subprocess.Popen(
        [sys.executable, "-m", "proctor", "box", "metrics", "--serve", "0"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    address = server.stderr.readline().strip()
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert b"# TYPE proctor_sandbox_alive gauge" in answer.read()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(10)
        server.stderr.close()


def test_a_ttl_ends_a_detached_sandbox_and_its_edge(home: Path) -> None:
    assert proctor("run", "--detach", *SMALL, "--ttl", "0.5").returncode == 0
    for _ in range(200):
        if [path.name for path in (home / "edges").iterdir()] == ["lock"]:
            return
        time.sleep(0.05)
    pytest.fail("the background Edge is still there")


def talk(sandbox: str, typed: bytes) -> str:
    """Type into `proctor box shell` on a real terminal and return what was shown."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "proctor", "box", "shell", sandbox])
    shown = b""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if typed and b"#" in shown:
            os.write(terminal, typed)
            typed = b""
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:
                break
    os.close(terminal)
    os.waitpid(child, 0)
    return shown.decode("utf-8", "replace")
