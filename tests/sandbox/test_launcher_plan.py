"""Plans: encoding in Python, decoding in C (built with sanitizers), and everything that may go wrong in between."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.sandbox.native import seccomp
from proctor.sandbox.native.idslices import IdSlice
from proctor.sandbox.native.launcher import BINARY
from proctor.sandbox.native.plan import (
    Bind,
    CgroupTree,
    LauncherSetup,
    Limits,
    LoopUpper,
    MemoryUpper,
    Plan,
    decode_reply,
    encode_plan,
    encode_setup,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

CSRC = BINARY.parent.parent / "csrc"

_HARNESS = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "plan.h"

/* Frames of u32 length, u8 kind on stdin; one line of answer for each. */
int main(void) {
    unsigned char head[5];
    static struct plan plan;
    static struct config config;
    while (fread(head, 1, 5, stdin) == 5) {
        unsigned length = head[0] | head[1] << 8 | head[2] << 16 | (unsigned)head[3] << 24;
        unsigned char *data = malloc(length ? length : 1); /* exactly as long, so that ASan sees the end */
        if (fread(data, 1, length, stdin) != length) return 1;
        struct failure failure = {"", 0};
        if (head[4] == 'c') {
            if (config_parse(data, length, &config, &failure) < 0) printf("! %s\n", failure.step);
            else printf("%s %u %u %u %u %u\n", config.edge, config.cgroup_count, config.pool, config.uid_start,
                        config.uid_ranges, config.guest_uid);
        } else if (plan_parse(data, length, &plan, &failure) < 0) {
            printf("! %s\n", failure.step);
        } else {
            printf("%s %s", plan.name, plan.hostname);
            for (unsigned i = 0; i < plan.layer_count; i++)
                plan.layers[i].path ? printf(" L%s", plan.layers[i].path) : printf(" F%u", plan.layers[i].fd_index);
            for (unsigned i = 0; i < plan.bind_count; i++)
                printf(" B%s:%s", plan.binds[i].source, plan.binds[i].target);
            if (plan.upper == UPPER_MEMORY)
                printf(" M%llu:%llu", (unsigned long long)plan.upper_bytes, (unsigned long long)plan.upper_inodes);
            else printf(" U%s", plan.upper_path);
            printf(" %llu %llu %llu %llu %llx %llu %u %d %u\n", (unsigned long long)plan.memory_bytes,
                   (unsigned long long)plan.cpu_quota_us, (unsigned long long)plan.cpu_period_us,
                   (unsigned long long)plan.pids, (unsigned long long)plan.capabilities,
                   (unsigned long long)plan.shm_bytes, plan.flags, plan.network, plan.seccomp_count);
        }
        fflush(stdout);
        free(data);
    }
    return 0;
}
"""


class Decoder:
    """The C decoder in a process of its own, under AddressSanitizer and UBSan."""

    def __init__(self, binary: Path) -> None:
        self._process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, message: bytes, kind: str = "p") -> str:
        """What the decoder says about the fields of `message` (its header is not its business)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        body = message[16:]
        self._process.stdin.write(struct.pack("<IB", len(body), ord(kind)) + body)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the decoder died"
        return line.decode("utf-8", "surrogateescape").rstrip("\n")

    def close(self) -> int:
        self._process.communicate()
        return self._process.returncode


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "main.c").write_text(_HARNESS)
    flags = ["-std=c11", "-g", "-O1", "-D_GNU_SOURCE", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    built = subprocess.run(
        [compiler, *flags, "-I", CSRC, "-o", folder / "decoder", folder / "main.c", CSRC / "plan.c"],
        capture_output=True,
        text=True,
    )
    if "libasan" in built.stderr or "sanitize" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    decoder = Decoder(folder / "decoder")
    yield decoder
    assert decoder.close() == 0


_NAMES = st.text("abcXYZ019-_", min_size=1, max_size=63)
_PATHS = st.text(st.characters(blacklist_characters="\0 \n", blacklist_categories=["Cs"]), max_size=60).map(
    lambda text: Path("/" + text)
)
_TARGETS = st.lists(st.text("ab.c", min_size=1, max_size=8).filter(lambda part: part != ".."), min_size=1).map(
    lambda parts: "/" + "/".join(parts)
)
_U64 = st.integers(1, 2**64 - 1)

_PLANS = st.builds(
    Plan,
    name=_NAMES,
    hostname=_NAMES,
    layers=st.lists(_PATHS | st.integers(3, 500), min_size=1, max_size=12).map(tuple),
    upper=st.builds(MemoryUpper, _U64, _U64) | st.builds(LoopUpper, _PATHS),
    limits=st.builds(Limits, _U64, _U64, _U64, _U64),
    seccomp=st.just(seccomp.program("x86_64")),
    binds=st.lists(st.builds(Bind, _PATHS, _TARGETS), max_size=5).map(tuple),
    capabilities=_U64,
    network=st.sampled_from(["none", "open"]),
    shm_bytes=_U64 | st.none(),
    force_paths=st.booleans(),
)


def shown(plan: Plan) -> str:
    """What the decoder must say about `plan`."""
    words = [plan.name, plan.hostname]
    descriptors = iter(range(len(plan.layers)))
    words += [f"F{next(descriptors)}" if isinstance(layer, int) else f"L{layer}" for layer in plan.layers]
    words += [f"B{bind.source}:{bind.target}" for bind in plan.binds]
    upper = plan.upper
    words.append(f"M{upper.size_bytes}:{upper.inodes}" if isinstance(upper, MemoryUpper) else f"U{upper.image}")
    limits = plan.limits
    words += [str(value) for value in (limits.memory_bytes, limits.cpu_quota_us, limits.cpu_period_us, limits.pids)]
    words += [f"{plan.capabilities:x}", str(plan.shm_size), str(int(plan.force_paths))]
    words += [str(int(plan.network == "open")), str(len(plan.seccomp) // 8)]
    return " ".join(words)


_SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(plan=_PLANS)
@_SETTINGS
def test_what_python_encodes_c_decodes(decode: Decoder, plan: Plan) -> None:
    assert decode(encode_plan(plan, 7)) == shown(plan)


@given(plan=_PLANS, data=st.data())
@_SETTINGS
def test_a_damaged_plan_is_refused_or_decoded_but_never_overread(
    decode: Decoder, plan: Plan, data: st.DataObject
) -> None:
    message = bytearray(encode_plan(plan, 7))
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(16, len(message) - 1))
        message[position] = data.draw(st.integers(0, 255))
    del message[data.draw(st.integers(16, len(message))) :]
    assert decode(bytes(message))


@given(body=st.binary(max_size=400), kind=st.sampled_from("pc"))
@_SETTINGS
def test_noise_is_refused(decode: Decoder, body: bytes, kind: str) -> None:
    assert decode(bytes(16) + body, kind).startswith("! ")


def test_every_cut_of_a_plan_is_refused(decode: Decoder, tmp_path: Path) -> None:
    plan = Plan("n", (tmp_path,), MemoryUpper(1, 1), Limits(1, 1), bytes(8))
    message = encode_plan(plan, 1)
    complete = len(message)
    # Optional fields come last; what is left without them is complete too.
    required = complete - sum(6 + size for size in (4, 8, 4))
    for cut in range(16, required):
        assert decode(message[:cut]).startswith("! "), cut


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        (99, b""),  # unknown
        (1, b"a/b\0"),  # a name that is a path
        (1, b"..\0"),
        (1, b"a\0b\0"),  # a zero inside
        (1, b"abc"),  # no zero at the end
        (2, b"relative\0"),
        (3, b"\xff\xff\xff\xff"),
        (4, bytes(15)),
        (5, b"/second-upper\0"),
        (6, b"/only-source\0"),
        (6, b"/source\0relative\0"),
        (10, bytes(7)),
        (10, b""),
        (11, struct.pack("<I", 2)),
        (13, struct.pack("<I", 4)),
    ],
)
def test_a_field_that_cannot_be_true_is_refused(decode: Decoder, tmp_path: Path, tag: int, value: bytes) -> None:
    message = encode_plan(Plan("n", (tmp_path,), MemoryUpper(1, 1), Limits(1, 1), bytes(8)), 1)
    assert not decode(message).startswith("!")
    assert decode(message + struct.pack("<HI", tag, len(value)) + value) == "! plan-field"


def test_the_set_up_is_decoded(decode: Decoder) -> None:
    trees = (CgroupTree("memory", Path("/cg/memory")), CgroupTree("unified", Path("/cg/unified")))
    setup = LauncherSetup("edge-1", trees, 8, 1 << 20, 16, 70000)
    assert decode(encode_setup(setup), "c") == "edge-1 2 8 1048576 16 70000"


@pytest.mark.parametrize(
    "change",
    [
        {"pool": 0},
        {"uid_start": 0},  # real users' ids
        {"uid_start": 0x7FFF0000},  # beyond 2^31
        {"uid_ranges": 0},
        {"guest_uid": 0},
        {"guest_uid": (1 << 20) + 5},  # an id that a sandbox has
        {"guest_uid": (1 << 20) - 5},  # the sixth guest has one
        {"cgroups": ()},
    ],
)
def test_a_set_up_with_dangerous_ids_is_refused(decode: Decoder, change: dict[str, object]) -> None:
    setup = LauncherSetup("edge-1", (CgroupTree("memory", Path("/cg")),), 8, 1 << 20, 16, 70000)
    assert decode(encode_setup(replace(setup, **change)), "c").startswith("! ")  # type: ignore[arg-type]


def test_every_edge_has_ids_that_a_launcher_accepts(decode: Decoder) -> None:
    edges = [f"edge-{number}" for number in range(200)]
    assert len({(IdSlice.by_name(edge).uid_start, IdSlice.by_name(edge).guest_uid) for edge in edges}) == 10
    for edge in edges:
        trees = (CgroupTree("*", Path("/cg")),)
        setup = LauncherSetup(edge, trees, 8, IdSlice.by_name(edge).uid_start, 2048, IdSlice.by_name(edge).guest_uid)
        assert not decode(encode_setup(setup), "c").startswith("!")


@pytest.mark.parametrize("data", [b"", bytes(16), b"1PRC\1\0\x09\0" + bytes(8), b"1PRC\1\0\4\0" + bytes(9)])
def test_a_message_that_is_not_the_launchers_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"message|magic|type"):
        decode_reply(data)


def test_a_text_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    plan = Plan("n", (tmp_path,), LoopUpper(Path("/a\0b")), Limits(1, 1), bytes(8))
    with pytest.raises(ConfigError):
        encode_plan(plan, 1)


def test_a_plan_that_is_too_long_is_refused(tmp_path: Path) -> None:
    binds = tuple(Bind(Path("/" + "x" * 3000), f"/{number}") for number in range(64))
    with pytest.raises(ConfigError, match="bytes when encoded"):
        encode_plan(Plan("n", (tmp_path,), MemoryUpper(1, 1), Limits(1, 1), bytes(8), binds=binds), 1)
