"""Commands through a real guest: output, input, ends, limits of the table."""

from __future__ import annotations

import hashlib
import os
import time

import anyio
import pytest

from proctor.sandbox.contract import EndReason, OutputLimit, SandboxError, SandboxLost
from proctor.sandbox.native.channel import COMMANDS_MAX

from .guests import ENV, dev_guest

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]
MIB = 1 << 20


async def test_streams_and_exit_code_are_kept_apart() -> None:
    async with dev_guest() as guest:
        result = await guest.exec("echo out; echo err >&2; exit 7", env=ENV)
    assert (result.stdout.data, result.stderr.data, result.exit_code) == (b"out\n", b"err\n", 7)
    assert result.signal is None
    assert result.reason is None
    assert result.cpu_s is not None


async def test_a_signal_is_told_from_an_exit_code() -> None:
    async with dev_guest() as guest:
        result = await guest.exec("kill -TERM $$", env=ENV)
    assert (result.exit_code, result.signal) == (None, 15)


async def test_the_environment_is_exact_but_for_the_login_names() -> None:
    async with dev_guest() as guest:
        bare = await guest.exec(["/usr/bin/env"], env={"A": "b=c"}, login_env=False)
        login = await guest.exec(["/usr/bin/env"], env={"HOME": "/x"})
    assert bare.stdout.data == b"A=b=c\n"
    assert sorted(login.text.split()) == ["HOME=/x", "LOGNAME=root", "USER=root"]


async def test_a_program_is_found_by_the_given_path_only(tmp_path: pytest.TempPathFactory) -> None:
    async with dev_guest() as guest:
        assert (await guest.exec(["true"], env={"PATH": "/bin:/usr/bin"})).ok
        missing = await guest.exec(["true"], env={"PATH": "/nowhere"})
    assert missing.exit_code == 127
    assert missing.stderr.data == b"proctor: exec: true: No such file or directory\n"


@pytest.mark.parametrize(
    ("argv", "options", "code"),
    [
        (["/etc/passwd"], {}, 126),
        (["/bin/true"], {"cwd": "/nowhere"}, 126),
        (["/bin/true"], {"user": "no-such-user"}, 126),
        (["/bin/true", "a\0b"], {}, 126),
        (["/bin/true", "x" * (3 * MIB)], {}, 126),
    ],
)
async def test_what_the_candidate_can_cause_is_a_result(argv: list[str], options: dict[str, str], code: int) -> None:
    async with dev_guest() as guest:
        result = await guest.exec(argv, env=ENV, **options)
        assert (result.exit_code, result.error_text[:9]) == (code, "proctor: ")
        assert (await guest.exec(["/bin/true"], env=ENV)).ok


async def test_a_script_without_an_interpreter_line_is_run_by_the_shell(tmp_path: os.PathLike[str]) -> None:
    script = f"{tmp_path}/script"
    async with dev_guest() as guest:
        await guest.write(script, b"echo shell $1", mode=0o755)
        assert (await guest.exec([script, "word"], env=ENV)).text == "shell word\n"


async def test_any_bytes_pass_unchanged() -> None:
    data = bytes(range(256)) * 17 + b"\xff\xfe\x00\n"
    async with dev_guest() as guest:
        result = await guest.exec(["/bin/cat"], env=ENV, stdin=data)
        argument = await guest.exec(["/usr/bin/printf", "%s", "\udcff\udc80"], env=ENV)
    assert result.stdout.data == data
    assert argument.stdout.data == b"\xff\x80"


async def test_64_mib_go_through_and_come_back() -> None:
    data = os.urandom(MIB) * 64
    async with dev_guest() as guest:
        result = await guest.exec(["/bin/cat"], env=ENV, stdin=data, limit=OutputLimit(64 * MIB, 0))
    assert hashlib.sha256(result.stdout.head).digest() == hashlib.sha256(data).digest()


async def test_a_flood_is_counted_exactly_and_kept_at_both_ends() -> None:
    command = "head -c 50000003 /dev/zero | tr '\\0' a; printf END"
    async with dev_guest() as guest:
        result = await guest.exec(command, env=ENV, limit=OutputLimit(1000, 1000))
    assert result.stdout.total == 50_000_006
    assert result.stdout.dropped == 50_000_006 - 2000
    assert (result.stdout.head, result.stdout.tail) == (b"a" * 1000, b"a" * 997 + b"END")


async def test_a_command_that_does_not_read_its_input_still_ends() -> None:
    async with dev_guest() as guest:
        result = await guest.exec("exec 0<&-; echo done", env=ENV, stdin=bytes(8 * MIB))
    assert result.ok


async def test_a_time_out_keeps_the_output_so_far() -> None:
    async with dev_guest() as guest:
        result = await guest.exec("echo before; sleep 100; echo after", env=ENV, timeout_s=0.3)
    assert result.timed_out
    assert result.reason is EndReason.EXEC_TIMEOUT
    assert result.text == "before\n"
    assert result.duration_s < 5


async def test_the_report_descriptor_is_a_stream_of_its_own() -> None:
    async with dev_guest() as guest:
        result = await guest.exec("echo verdict >&9; echo out; ls /proc/self/fd", env=ENV, report_fd=9)
    assert result.report == b"verdict\n"
    assert result.text.split() == ["out", "0", "1", "2", "3", "9"]


async def test_without_a_report_nothing_is_inherited_but_the_standard_streams() -> None:
    async with dev_guest() as guest:
        result = await guest.exec(["/bin/ls", "/proc/self/fd"], env=ENV)
    assert result.text.split() == ["0", "1", "2", "3"]  # 3 is ls reading the directory


async def test_children_start_with_default_signals_and_limits() -> None:
    async with dev_guest() as guest:
        status = await guest.exec("cat /proc/self/status", env=ENV)
        limits = await guest.exec("ulimit -c; umask", env=ENV)
    facts = dict(line.split(":\t", 1) for line in status.text.splitlines() if ":\t" in line)
    assert [facts[name] for name in ("SigBlk", "SigIgn", "SigCgt")] == ["0" * 16] * 3
    assert facts["NoNewPrivs"] == "1"
    assert limits.text.split() == ["0", "0022"]


async def test_live_output_arrives_while_the_command_runs() -> None:
    seen: list[tuple[str, bytes, float]] = []
    async with dev_guest() as guest:
        await guest.exec(
            "echo one; sleep 0.3; echo two >&2",
            env=ENV,
            on_output=lambda *chunk: seen.append((*chunk, time.monotonic())),
        )
    assert [chunk[:2] for chunk in seen] == [("stdout", b"one\n"), ("stderr", b"two\n")]
    assert seen[1][2] - seen[0][2] > 0.2


async def test_an_error_in_the_callers_callback_reaches_the_caller_alone() -> None:
    def fail(stream: str, data: bytes) -> None:
        raise LookupError(stream)

    async with dev_guest() as guest:
        with pytest.raises(LookupError):
            await guest.exec("yes", env=ENV, on_output=fail)
        assert (await guest.exec(["/bin/true"], env=ENV)).ok


async def test_a_process_is_stopped_by_a_reader_that_does_not_read() -> None:
    async with dev_guest() as guest:
        process = await guest.start(
            "yes | head -c 10000000; echo finished > /tmp/$$.finished; rm /tmp/$$.finished", env=ENV
        )
        await anyio.sleep(0.3)
        busy = await guest.exec("pgrep -c head", env=ENV)
        total = 0
        async for _, data in process.output():
            total += len(data)
        result = await process.wait()
    assert busy.text == "1\n"  # still blocked: windows and pipes hold far less than 10 MB
    assert (total, result.exit_code) == (10_000_000, 0)


async def test_a_process_talks_both_ways() -> None:
    async with dev_guest() as guest:
        process = await guest.start(["/bin/cat"], env=ENV)
        chunks = process.output()
        for word in (b"first", b"second"):
            await process.write_stdin(word)
            assert await anext(chunks) == ("stdout", word)
        await process.close_stdin()
        assert (await process.wait()).exit_code == 0


async def test_closing_the_input_twice_is_fine_and_writing_after_that_is_an_error() -> None:
    async with dev_guest() as guest:
        process = await guest.start("sleep 0.2; cat", env=ENV)
        await process.write_stdin(b"last")
        await process.close_stdin()
        await process.close_stdin()
        with pytest.raises(SandboxError, match="closed"):
            await process.write_stdin(b"too late")
        result = await process.wait()
        assert (result.text, result.exit_code) == ("last", 0)
        await process.close_stdin()
        await process.write_stdin(b"to nobody") if process.stdin_open else None
        assert (await guest.exec(["/bin/true"], env=ENV)).ok


async def test_killing_a_process_says_so() -> None:
    async with dev_guest() as guest:
        process = await guest.start("sleep 100", env=ENV)
        await process.kill()
        result = await process.wait()
    assert (result.signal, result.reason) == (9, EndReason.KILLED)


async def test_a_cancelled_command_is_killed() -> None:
    async with dev_guest() as guest:
        with anyio.move_on_after(0.3):
            await guest.exec("sleep 7777", env=ENV)
        # The kill was sent before this, and the guest takes things in their order.
        assert (await guest.exec("pgrep -f 'sleep 777[7]' | xargs -r ps -o stat= -p", env=ENV)).text.strip() in (
            "",
            "Z",
        )


async def test_two_hundred_at_once_wait_their_turn() -> None:
    codes: list[int | None] = []

    async with dev_guest() as guest:

        async def one(number: int) -> None:
            codes.append((await guest.exec(f"sleep 0.05; exit {number % 100}", env=ENV)).exit_code)

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(one, number)
    assert sorted(code or 0 for code in codes) == sorted(number % 100 for number in range(200))


async def test_a_full_table_is_refused_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.sandbox.native.channel._QUEUE_S", 0.2)
    async with dev_guest() as guest:
        for _ in range(COMMANDS_MAX):
            await guest.start(["/bin/sleep", "100"], env=ENV)
        with pytest.raises(SandboxError, match="too many commands"):
            await guest.exec(["/bin/true"], env=ENV)
        assert (await guest.stat("/")).kind == "dir"  # files have places of their own
        assert await guest.kill_all() == 0
        assert (await guest.exec(["/bin/true"], env=ENV)).ok


async def test_every_waiter_hears_of_a_lost_guest() -> None:
    errors: list[SandboxLost] = []

    async with dev_guest() as guest:

        async def wait() -> None:
            try:
                await guest.exec("sleep 100", env=ENV)
            except SandboxLost as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(wait)
            await anyio.sleep(0.1)
            guest.close()
        with pytest.raises(SandboxLost):
            await guest.exec(["/bin/true"], env=ENV)
    assert [error.reason for error in errors] == [EndReason.GUEST_LOST] * 5


async def test_failures_are_attributed_by_the_owner_of_the_counters() -> None:
    class Counters:
        def before(self) -> object:
            return "baseline"

        def after(self, baseline: object, result: object) -> EndReason | None:
            assert baseline == "baseline"
            return EndReason.OOM

    async with dev_guest(attribution=Counters()) as guest:
        assert (await guest.exec("exit 0", env=ENV)).reason is None
        assert (await guest.exec("kill -9 $$", env=ENV)).reason is EndReason.OOM
        assert (await guest.exec("sleep 9", env=ENV, timeout_s=0.1)).reason is EndReason.EXEC_TIMEOUT


async def test_ping_and_kill_all_of_nothing() -> None:
    async with dev_guest() as guest:
        assert await guest.ping() < 1
        assert await guest.kill_all() == 0
