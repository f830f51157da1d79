"""Commands: how they end, what they say, what they are given."""

from __future__ import annotations

import anyio

from proctor.sandbox.conformance.checks import Subject, expect, expect_ok
from proctor.sandbox.contract import EndReason, OutputLimit


async def exit_codes(subject: Subject) -> None:
    """A command's exit code or signal is its result, not an error."""
    async with subject.box() as box:
        seven = await box.exec("exit 7")
        expect((seven.exit_code, seven.signal, seven.reason) == (7, None, None), "exit 7 is exit code 7", seven)
        killed = await box.exec("kill -TERM $$; sleep 5")
        expect((killed.exit_code, killed.signal) == (None, 15), "SIGTERM is signal 15", killed)
        missing = await box.exec(["no-such-program"])
        expect(missing.exit_code == 127, "a missing program is exit code 127", missing)


async def time_out(subject: Subject) -> None:
    """After its time-out a command is killed, and what it had printed is returned."""
    async with subject.box() as box:
        result = await box.exec("echo before; echo aside >&2; sleep 600; echo after", timeout_s=1.0)
        expect(result.timed_out and result.reason is EndReason.EXEC_TIMEOUT, "the result says EXEC_TIMEOUT", result)
        expect(result.stdout.data == b"before\n", "output before the time-out is there", result)
        expect(result.stderr.data == b"aside\n", "errors before the time-out are there", result)
        expect_ok(await box.exec("true"))


async def bytes_as_they_are(subject: Subject) -> None:
    """Input and output are bytes: every value, no text encoding, nothing added or lost."""
    data = bytes(range(256)) * 1500 + b"\xff\xfe\x80 not UTF-8 \xc3"
    async with subject.box() as box:
        result = await box.exec(["cat"], stdin=data)
        expect(result.stdout.data == data, "cat returns what it was given", len(result.stdout.data))
        both = await box.exec(["/bin/sh", "-c", r"printf '\377\000a' ; printf '\376b' >&2"])
        expect((both.stdout.data, both.stderr.data) == (b"\xff\0a", b"\xfeb"), "streams stay apart", both)


async def truncation(subject: Subject) -> None:
    """Of a flood of output head and tail are kept, and every dropped byte is counted."""
    async with subject.box() as box:
        limit = OutputLimit(head_bytes=1000, tail_bytes=500)
        result = await box.exec("echo first; head -c 5000000 /dev/zero; echo last", limit=limit)
        expect(result.stdout.total == 5_000_011, "every byte is counted", result.stdout.total)
        expect(result.stdout.dropped == 5_000_011 - 1500, "what is not kept is counted", result.stdout.dropped)
        expect(result.stdout.head.startswith(b"first\n"), "the head is kept", result.stdout.head[:10])
        expect(result.stdout.tail.endswith(b"\0last\n"), "the tail is kept", result.stdout.tail[-10:])


async def live_output(subject: Subject) -> None:
    """Output is shown while the command runs, in order."""
    seen: list[bytes] = []
    async with subject.box() as box:
        process = await box.start("read line; echo got $line; read line; echo and $line")
        await process.write_stdin(b"one\n")
        with anyio.fail_after(20):
            async for stream, data in process.output():
                seen.append(data)
                expect(stream == "stdout", "only standard output speaks", stream)
                if b"".join(seen) == b"got one\n":
                    await process.write_stdin(b"two\n")
                    await process.close_stdin()
        result = await process.wait()
        expect(b"".join(seen) == b"got one\nand two\n", "both lines came", seen)
        expect(result.exit_code == 0, "and it ended by itself", result)


async def environment(subject: Subject) -> None:
    """A command has the environment, directory and user that it was given."""
    async with subject.box(env={"A": "spec"}, workdir="/srv/here") as box:
        text = (await box.exec("echo $A $B; pwd; id -u; id -g", env={"B": "call"})).text
        expect(text.split("\n") == ["spec call", "/srv/here", "0", "0", ""], "as asked, as root", text)
        other = (await box.exec("id -u; id -g; pwd; echo $A", user="1000:1001", cwd="/tmp", env={"A": "x"})).text
        expect(other.split("\n") == ["1000", "1001", "/tmp", "x", ""], "as asked, as another user", other)


async def report_channel(subject: Subject) -> None:
    """A command can report through a descriptor that is neither of its standard streams."""
    async with subject.box() as box:
        result = await box.exec("echo loud; echo verdict >&5", report_fd=5)
        expect(
            (result.report, result.stdout.data) == (b"verdict\n", b"loud\n"), "the report comes apart", result.report
        )


async def terminal(subject: Subject) -> None:
    """A command can have a terminal of a given size."""
    async with subject.box() as box:
        process = await box.start(["/bin/sh", "-c", "test -t 0 && test -t 1 && stty size"], pty=(97, 31))
        result = await process.wait()
        expect(result.text.strip() == "31 97", "it is a terminal of 31 rows and 97 columns", result)


async def many_at_once(subject: Subject) -> None:
    """Commands run side by side without mixing their output."""
    got: dict[int, str] = {}

    async with subject.box(resources={"pids": 128}) as box:

        async def one(number: int) -> None:
            got[number] = (await box.exec(f"echo {number}; sleep 0.1; echo {number}")).text

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(one, number)
    expect(got == {number: f"{number}\n{number}\n" for number in range(12)}, "each has its own", got)


CHECKS = (
    exit_codes,
    time_out,
    bytes_as_they_are,
    truncation,
    live_output,
    environment,
    report_channel,
    terminal,
    many_at_once,
)
