"""The boundary as a whole, over socket pairs: what gets out, what is refused, what is on record."""

from __future__ import annotations

import contextlib
import ssl

import anyio
import pytest

from proctor.common import RefusedError
from proctor.sandbox.net.authority import Authority
from proctor.sandbox.net.pipes import TlsPipe
from proctor.sandbox.net.policy import NONE, NetworkPolicy, Rule
from proctor.sandbox.net.secrets import Secret
from proctor.sandbox.net.services import Service

from .inside import Inside, drain, inside, server, web

pytestmark = pytest.mark.anyio


def internal(where: str, **fields: object) -> Rule:
    return Rule(**{"host": "one.test", "internal": True, "target": where, **fields})  # type: ignore[arg-type]


async def test_http_reaches_the_listed_name_and_is_on_record() -> None:
    seen: list[bytes] = []
    async with server(web(seen=seen)) as where, inside(NetworkPolicy("allow", (internal(where),))) as program:
        answer = await program.get("one.test", "/a?b")
        assert answer.endswith(b"hello")
        request = await program.last("request")
        assert (request.decision, request.method, request.path, request.status) == ("allowed", "GET", "/a", 200)
        connection = await program.last()
        assert (connection.name, connection.port, connection.protocol) == ("one.test", 80, "http")
        assert connection.address == "127.0.0.1"
        assert connection.received == len(answer)
        assert connection.sent > 40
        assert request.connection == connection.connection
        assert program.boundary.decisions()["connections_by_name"] == {"one.test": 1}
    assert seen[0].startswith(b"GET /a?b HTTP/1.1")


async def test_nothing_is_the_default() -> None:
    async with inside(NONE) as program:
        assert await program.look_up("one.test") is None
        assert program.of("lookup")[0].decision == "refused"
        assert not program.transport.places


async def test_every_request_of_a_connection_is_checked() -> None:
    """Item 32: a connection kept alive for one name cannot be used for a second."""
    seen: list[bytes] = []
    async with server(web(seen=seen)) as where, inside(NetworkPolicy("allow", (internal(where),))) as program:
        pipe = await program.dial("one.test")
        await pipe.send(b"GET /1 HTTP/1.1\r\nHost: one.test\r\n\r\n")
        assert (await pipe.receive()).endswith(b"hello")
        await pipe.send(b"GET /2 HTTP/1.1\r\nHost: two.test\r\n\r\n")
        assert b"403 Forbidden" in (answer := await drain(pipe))
        assert b"http-other-host" in answer
        # Pipelined: both heads arrive in one piece.
        both = b"GET /3 HTTP/1.1\r\nHost: one.test\r\n\r\nGET /4 HTTP/1.1\r\nHost: two.test\r\n\r\n"
        answer = await program.http("one.test", both)
        assert answer.count(b"HTTP/1.1 200") == 1
        assert answer.count(b"HTTP/1.1 403") == 1
    assert [head.split()[1] for head in seen] == [b"/1", b"/3"]


async def test_a_smuggled_request_does_not_reach_the_server() -> None:
    seen: list[bytes] = []
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: one.test\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nHost: one.test\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    async with server(web(seen=seen)) as where, inside(NetworkPolicy("allow", (internal(where),))) as program:
        answer = await program.http("one.test", head % len(smuggled) + smuggled)
        assert answer.startswith(b"HTTP/1.1 400")
    assert seen == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "protocol-not-allowed"),
        (b"\x00\x01\x02\x03", "protocol-not-allowed"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "http2-prior-knowledge"),
        (b"CONNECT 10.0.0.1:22 HTTP/1.1\r\nHost: one.test\r\n\r\n", "http-connect"),
        (b"GET http://169.254.169.254/ HTTP/1.1\r\nHost: one.test\r\n\r\n", "http-absolute-form"),
    ],
)
async def test_other_protocols_are_refused(data: bytes, reason: str) -> None:
    async def never(_: object) -> None:
        raise AssertionError("the server was reached")

    async with server(never) as where, inside(NetworkPolicy("allow", (internal(where),))) as program:
        pipe = await program.dial("one.test")
        await pipe.send(data)
        with anyio.move_on_after(5):
            with contextlib.suppress(OSError):
                await drain(pipe)
        event = await program.last()
        assert (event.decision, event.reason) == ("refused", reason)


async def test_other_protocols_pass_by_explicit_rule() -> None:
    async def greet(pipe: object) -> None:
        await pipe.send(b"220 hello\r\n")  # type: ignore[attr-defined]
        await pipe.send(b"got " + await pipe.receive())  # type: ignore[attr-defined]

    async with server(greet) as where:
        rule = internal(where, ports=(25,), protocol="tcp")
        async with inside(NetworkPolicy("allow", (rule,))) as program:
            pipe = await program.dial("one.test", 25)
            assert await pipe.receive() == b"220 hello\r\n"
            await pipe.send(b"EHLO")
            assert await drain(pipe) == b"got EHLO"
            assert (await program.last()).protocol == "tcp"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (["127.0.0.1"], "address-loopback"),
        (["169.254.169.254"], "address-metadata"),
        (["10.0.0.1"], "address-private"),
        (["::ffff:10.0.0.1"], "address-private"),
        (["8.8.8.8", "10.0.0.1"], "address-private"),
    ],
)
async def test_a_public_name_with_an_internal_address_is_refused(found: list[str], reason: str) -> None:
    """Items 27, 28 and 31: whatever an attacker's server answers, and however the name is spelt."""

    async def resolve(_: str) -> list[str]:
        await anyio.lowlevel.checkpoint()
        return found

    async with inside(NetworkPolicy("allow", (Rule("*.evil.test"),)), resolve=resolve) as program:
        answer = await program.get("metadata.evil.test")
        assert answer.startswith(b"HTTP/1.1 403")
        event = await program.last()
        assert (event.decision, event.reason) == ("refused", reason)


@pytest.mark.parametrize(
    ("host", "found", "reason"),
    [
        ("*.corp.test", "127.0.0.1", "address-loopback"),
        ("*.corp.test", "169.254.169.254", "address-metadata"),
        ("a.corp.test", "169.254.169.254", "address-metadata"),
        ("a.corp.test", "::ffff:169.254.169.254", "address-metadata"),
        ("a.corp.test", "169.254.7.7", "address-link-local"),
        ("a.corp.test", "0.0.0.0", "address-this-network"),
        ("a.corp.test", "127.0.0.1", "connect-refused"),
    ],
)
async def test_internal_is_one_s_own_network_and_not_everything(host: str, found: str, reason: str) -> None:
    async def resolve(_: str) -> list[str]:
        await anyio.lowlevel.checkpoint()
        return [found]

    policy = NetworkPolicy("allow", (Rule(host, (1,), internal=True),))
    async with inside(policy, resolve=resolve) as program:
        await program.get("a.corp.test", "/", 1)
        assert (await program.last()).reason == reason


async def test_the_checked_address_is_the_dialled_one() -> None:
    """Rebinding: the name is asked for once, so a second answer cannot differ from the checked one."""
    asked: list[str] = []

    async def resolve(name: str) -> list[str]:
        await anyio.lowlevel.checkpoint()
        asked.append(name)
        return ["203.0.113.9"] if len(asked) == 1 else ["127.0.0.1"]

    async with inside(NetworkPolicy("allow", (Rule("evil.test"),)), resolve=resolve) as program:
        await program.get("evil.test")
        assert (await program.last()).reason == "address-reserved"
    assert asked == ["evil.test"]


# --- TLS -------------------------------------------------------------------------------------------------------------


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.pem)


async def test_tls_passes_untouched_with_the_right_name() -> None:
    authority = Authority("upstream")
    tls = authority.context("one.test")
    async with server(web(), tls) as where, inside(NetworkPolicy("allow", (internal(where),))) as program:
        plain = await program.dial("one.test", 443)
        pipe = await TlsPipe.wrap(plain, trusting(authority), server_side=False, hostname="one.test")
        await pipe.send(b"GET / HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n")
        assert (await drain(pipe)).endswith(b"hello")
        event = await program.last()
        assert (event.protocol, event.sni, event.terminated, event.decision) == (
            "tls",
            "one.test",
            False,
            "allowed",
        )


@pytest.mark.parametrize(("name", "reason"), [("two.test", "tls-other-name"), (None, "tls-no-name")])
async def test_tls_for_another_name_or_none_is_refused(name: str | None, reason: str) -> None:
    async def never(_: object) -> None:
        raise AssertionError("the server was reached")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with server(never) as where, inside(NetworkPolicy("allow", (internal(where),))) as program:
        plain = await program.dial("one.test", 443)
        with pytest.raises((ssl.SSLError, OSError)):
            await TlsPipe.wrap(plain, context, server_side=False, hostname=name)
        await plain.aclose()
        event = await program.last()
        assert (event.decision, event.reason, event.sni) == ("refused", reason, name)


async def test_a_refused_address_is_said_in_words_of_tls() -> None:
    async def resolve(_: str) -> list[str]:
        await anyio.lowlevel.checkpoint()
        return ["10.0.0.1"]

    async with inside(NetworkPolicy("allow", (Rule("one.test"),)), resolve=resolve) as program:
        plain = await program.dial("one.test", 443)
        with pytest.raises((ssl.SSLError, OSError)) as caught:
            await TlsPipe.wrap(plain, ssl.create_default_context(), server_side=False, hostname="one.test")
        await plain.aclose()
        assert "ACCESS_DENIED" in str(caught.value)
        assert (await program.last()).reason == "address-private"


async def https(program: Inside, request: bytes, name: str = "one.test") -> bytes:
    plain = await program.dial(name, 443)
    pipe = await TlsPipe.wrap(plain, trusting(program.boundary.authority), server_side=False, hostname=name)
    await pipe.send(request)
    return await drain(pipe)


async def test_rules_on_methods_and_paths_are_kept_inside_tls() -> None:
    upstream, seen = Authority("upstream"), []
    async with server(web(seen=seen), upstream.context("one.test")) as where:
        rule = internal(where, methods=("GET",), paths=("/simple/",))
        async with inside(NetworkPolicy("allow", (rule,), upstream.pem)) as program:
            host = b"Host: one.test\r\nConnection: close\r\n\r\n"
            assert (await https(program, b"GET /simple/six/ HTTP/1.1\r\n" + host)).endswith(b"hello")
            for line, reason in (
                (b"GET /other HTTP/1.1\r\n", "path-not-allowed"),
                (b"GET /simple/%2e%2e/other HTTP/1.1\r\n", "path-not-allowed"),
                (b"DELETE /simple/six/ HTTP/1.1\r\n", "method-not-allowed"),
                (b"GET /simple/ HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n", "upgrade-not-allowed"),
                (b"GET /simple/ HTTP/1.1\r\nX-Original-URL: /other\r\n", "http-override-field"),
                (b"GET /simple/ HTTP/1.1\r\nX_HTTP_Method_Override: DELETE\r\n", "http-override-field"),
            ):
                answer = await https(program, line + host)
                assert answer.startswith(b"HTTP/1.1 403"), answer
                assert (await program.last("request")).reason == reason
            assert [event.path for event in program.of("request") if event.decision == "allowed"] == ["/simple/six/"]
            assert all(event.terminated for event in program.of("connection"))
    assert len(seen) == 1


async def test_the_upstream_certificate_is_verified_where_tls_ends_here() -> None:
    upstream = Authority("nobody trusts this one")
    tls = upstream.context("one.test")
    async with (
        server(web(), tls) as where,
        inside(NetworkPolicy("allow", (internal(where, methods=("GET",)),))) as program,
    ):
        answer = await https(program, b"GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 502")
        event = await program.last()
        assert (event.decision, event.reason) == ("failed", "upstream-certificate")


# --- secrets ---------------------------------------------------------------------------------------------------------

VALUE = "s3cr3t-value-0123456789"


async def test_a_secret_is_a_token_inside_and_a_value_at_its_host_alone() -> None:
    """Item 36: substituted for the bound host, masked on the way back, refused elsewhere; never on record."""
    upstream, seen = Authority("upstream"), []

    async def echo(pipe: object) -> None:
        data = await pipe.receive()  # type: ignore[attr-defined]
        seen.append(data)
        cut = data.index(VALUE.encode()) + 5 if VALUE.encode() in data else 10
        await pipe.send(b"HTTP/1.1 200 OK\r\nX-Echo: " + VALUE.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n")  # type: ignore[attr-defined]
        for part in (data[:cut], data[cut:]):
            await pipe.send(b"%x\r\n%s\r\n" % (len(part), part))  # type: ignore[attr-defined]
        await pipe.send(b"0\r\n\r\n")  # type: ignore[attr-defined]

    async with server(echo, upstream.context("one.test")) as where, server(web(seen=seen)) as other:
        rules = (internal(where), Rule("two.test", internal=True, target=other))
        secret = {"API_KEY": Secret(VALUE, ("one.test",))}
        async with inside(NetworkPolicy("allow", rules, upstream.pem), secrets=secret) as program:
            token = program.boundary.environment["API_KEY"]
            assert token.startswith("proctor-secret-")
            ask = f"GET / HTTP/1.1\r\nHost: one.test\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
            answer = await https(program, ask.encode())
            assert f"Bearer {VALUE}".encode() in seen[0]
            assert answer.startswith(b"HTTP/1.1 200")
            assert VALUE.encode() not in answer
            assert b"*" * len(VALUE) in answer
            assert (await program.last("request")).secrets == ("API_KEY",)

            refused = await program.get("two.test", "/", 80, f"X-Key: {token}")
            assert refused.startswith(b"HTTP/1.1 403")
            assert (await program.last("request")).reason == "secret-elsewhere"
            assert len(seen) == 1
            # Over plain HTTP the value would be readable on the way.
            refused = await program.get("one.test", "/", 80, f"X-Key: {token}")
            assert refused.startswith(b"HTTP/1.1 403")
            await program.last()
            assert VALUE not in repr(program.events)
            assert VALUE not in repr(program.boundary.decisions())
            assert VALUE not in repr(secret)


async def test_a_secret_does_not_come_back_in_a_websocket_or_by_halves() -> None:
    """A server that quotes what it was sent, as frames, or cut where the program wants it to be cut."""
    heads: list[bytes] = []

    async def quoting(pipe: object) -> None:
        head = await pipe.receive()  # type: ignore[attr-defined]
        heads.append(head)
        key = head.partition(b"X-Key: ")[2].partition(b"\r\n")[0]
        if b"websocket" not in head:
            body = key[:-1] + b"... ..." + key[1:] + b" " + key[: len(key) // 2 + 1]
            await pipe.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))  # type: ignore[attr-defined]
            return
        await pipe.send(b"HTTP/1.1 101 Go\r\nX-Echo: %s\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n" % key)  # type: ignore[attr-defined]
        await pipe.receive()  # type: ignore[attr-defined]
        for part in (b"\x81\x20" + key[:5], key[5:], b"\x81\x03end s3"):
            await pipe.send(part)  # type: ignore[attr-defined]
        await pipe.receive()  # type: ignore[attr-defined]
        await pipe.send(b"bye")  # type: ignore[attr-defined]

    async with server(quoting) as where:
        secret = {"KEY": Secret(VALUE, ("one.test",), plain=True)}
        async with inside(NetworkPolicy("allow", (internal(where),)), secrets=secret) as program:
            token = program.boundary.environment["KEY"]
            answer = await program.get("one.test", "/", 80, f"X-Key: {token}")
            stars = b"*" * (len(VALUE) - 1)
            assert answer.endswith(stars + b"... ..." + stars + b" " + b"*" * (len(VALUE) // 2 + 1))

            pipe = await program.dial("one.test")
            upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Extensions: permessage-deflate\r\n"
            await pipe.send(f"GET / HTTP/1.1\r\nHost: one.test\r\n{upgrade}X-Key: {token}\r\n\r\n".encode())
            data = b""
            while not data.endswith(b"\r\n\r\n"):
                data += await pipe.receive()
            await pipe.send(b"frame")
            while not data.endswith(b"end s3"):  # the beginning of the value is not kept for ever
                data += await pipe.receive()
            await pipe.send(b"frame")
            data += await drain(pipe)
            assert b"\x81\x20" + b"*" * len(VALUE) + b"\x81\x03end s3bye" in data
            assert VALUE.encode() not in data
    assert b"permessage-deflate" not in heads[1]


async def test_a_secret_in_basic_credentials() -> None:
    import base64

    seen: list[bytes] = []
    async with server(web(seen=seen)) as where:
        secret = {"KEY": Secret(VALUE, ("one.test",), plain=True)}
        async with inside(NetworkPolicy("allow", (internal(where),)), secrets=secret) as program:
            token = program.boundary.environment["KEY"]
            basic = base64.b64encode(f"user:{token}".encode()).decode()
            await program.get("one.test", "/", 80, f"Authorization: Basic {basic}")
    assert base64.b64encode(f"user:{VALUE}".encode()) in seen[0]


# --- change of policy ------------------------------------------------------------------------------------------------


async def test_a_policy_is_replaced_by_compare_and_set_and_cuts_what_it_forbids() -> None:
    async with server(web()) as where:
        both = NetworkPolicy("allow", (internal(where), Rule("two.test", internal=True, target=where)))
        async with inside(both) as program:
            kept, cut = await program.dial("one.test"), await program.dial("two.test")
            for pipe, name in ((kept, b"one.test"), (cut, b"two.test")):
                await pipe.send(b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % name)
                assert (await pipe.receive()).endswith(b"hello")
            version = program.boundary.version
            only_one = NetworkPolicy("allow", (internal(where),))
            assert await program.boundary.set_policy(only_one, expect=version, phase="second") == version + 1
            with pytest.raises(RefusedError):
                await program.boundary.set_policy(both, expect=version)
            with anyio.fail_after(5):
                with contextlib.suppress(OSError):
                    assert await cut.receive() == b""
            await kept.send(b"GET / HTTP/1.1\r\nHost: one.test\r\n\r\n")
            assert (await kept.receive()).endswith(b"hello")
            assert await program.look_up("two.test") is None
            event = program.of("connection")[-1]
            assert (event.name, event.decision, event.reason) == ("two.test", "refused", "policy-changed")
            assert {port for address, port in program.transport.places} == {80, 443}
            assert program.events[-1].phase == "second"
            await kept.aclose()
            with pytest.raises(RefusedError):
                await program.boundary.set_policy(NetworkPolicy("open"))


async def test_a_request_in_flight_is_cut_when_its_path_is_forbidden() -> None:
    async def slow(pipe: object) -> None:
        await pipe.receive()  # type: ignore[attr-defined]
        await anyio.sleep_forever()

    async with server(slow) as where, inside(NetworkPolicy("allow", (internal(where),))) as program:
        pipe = await program.dial("one.test")
        await pipe.send(b"GET /secret HTTP/1.1\r\nHost: one.test\r\n\r\n")
        await anyio.sleep(0.05)
        await program.boundary.set_policy(NetworkPolicy("allow", (internal(where, paths=("/open/",)),)))
        with anyio.fail_after(5):
            with contextlib.suppress(OSError):
                assert await pipe.receive() == b""
        assert (await program.last()).reason == "policy-changed"
        await pipe.aclose()


# --- services --------------------------------------------------------------------------------------------------------


async def test_an_application_answers_a_name_without_any_policy() -> None:
    gone = anyio.Event()

    async def app(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        visit = scope["extensions"]["proctor.visit"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": f"data: {visit.name}\n\n".encode(), "more_body": True})  # type: ignore[operator]
        while (await receive())["type"] != "http.disconnect":  # type: ignore[operator]
            pass
        gone.set()

    async with inside(NONE, services={"model.proctor": Service.asgi(app)}) as program:  # type: ignore[arg-type]
        pipe = await program.dial("model.proctor")
        await pipe.send(b"GET /v1 HTTP/1.1\r\nHost: model.proctor\r\n\r\n")
        data = b""
        with anyio.fail_after(5):  # the event comes at once, though the response goes on
            while b"data: model.proctor" not in data:
                data += await pipe.receive()
        await pipe.aclose()
        with anyio.fail_after(5):
            await gone.wait()
        request = await program.last("request")
        assert (request.service, request.path, request.status) == (True, "/v1", 200)
        assert await program.look_up("other.proctor") is None


async def test_an_application_may_finish_when_its_caller_has_gone() -> None:
    begun, finished = anyio.Event(), anyio.Event()

    async def app(scope: object, receive: object, send: object) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":  # type: ignore[operator]
            pass
        await anyio.sleep(0.1)  # the record of the call, say
        finished.set()

    async with inside(NONE, services={"model.proctor": Service.asgi(app)}) as program:  # type: ignore[arg-type]
        pipe = await program.dial("model.proctor")
        await pipe.send(b"GET /v1 HTTP/1.1\r\nHost: model.proctor\r\n\r\n")
        await begun.wait()
        await pipe.aclose()
        await program.last()
        assert finished.is_set()


async def test_a_handler_answers_over_tls() -> None:
    async def handler(pipe: object, visit: object) -> None:
        await pipe.send(b"hello " + visit.name.encode() + b" " + await pipe.receive())  # type: ignore[attr-defined]

    service = Service.stream(handler, ports=(), tls_ports=(443,))  # type: ignore[arg-type]
    async with inside(NONE, services={"*.trap.test": service}) as program:
        assert await https(program, b"x", "a.trap.test") == b"hello a.trap.test x"
        assert (await program.last()).terminated
