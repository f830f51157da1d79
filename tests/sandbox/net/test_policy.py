"""The policy document: normal forms, what a rule covers, and what is refused with the field's name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.sandbox.net import names
from proctor.sandbox.net.policy import NetworkPolicy, Rule


def test_names_in_every_spelling_of_an_address_are_no_names() -> None:
    for text in (
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "a.0x7f",
        "169.254.169.254",
        "10.0.0.010",
        "[::1]",
        "::1",
        "a..b",
        "-a.example",
        "a-.example",
        "a b.example",
        "bücher.example",
        "",
        ".",
        "x" * 64 + ".example",
        ".".join(["x" * 60] * 5),
    ):
        assert names.normal(text) is None, text


def test_wildcards_cover_what_is_below_and_nothing_beside() -> None:
    policy = NetworkPolicy("allow", (Rule("*.Example.ORG.", (443,)), Rule("one.test")))
    assert policy.ports_of("a.example.org") == {443}
    assert policy.ports_of("a.b.example.org") == {443}
    for other in ("example.org", "notexample.org", "a.example.org.evil.test", "two.test", "a.one.test"):
        assert not policy.ports_of(other)
    assert policy.rules_for("one.test", 80)
    assert not policy.rules_for("one.test", 22)


def test_any_public_name_is_called_public_and_does_not_cover_resolvers() -> None:
    policy = NetworkPolicy("allow", (Rule("*"),))
    assert policy.summary == "public"
    assert policy.ports_of("pages.example")
    assert not policy.ports_of("dns.google")
    assert NetworkPolicy("allow", (Rule("*"), Rule("dns.google"))).ports_of("dns.google")


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"mode": "sometimes"}, "network.mode"),
        ({"mode": "none", "rules": [{"host": "a.test"}]}, "network"),
        ({"mode": "open", "rules": [{"host": "a.test"}]}, "network"),
        ({"mode": "allow", "rules": [{"host": "10.0.0.1"}]}, "network.rules[0].host"),
        ({"mode": "allow", "rules": [{"host": "*.com"}]}, "network.rules[0].host"),
        ({"mode": "allow", "rules": [{"host": "a.*.test"}]}, "network.rules[0].host"),
        ({"mode": "allow", "rules": [{"host": "a.test", "ports": [0]}]}, "network.rules[0].ports[0]"),
        ({"mode": "allow", "rules": [{"host": "a.test", "ports": []}]}, "network.rules[0].ports"),
        ({"mode": "allow", "rules": [{"host": "a.test", "ports": ["80"]}]}, "network.rules[0].ports[0]"),
        ({"mode": "allow", "rules": [{"host": "a.test", "methods": ["get"]}]}, "network.rules[0].methods[0]"),
        ({"mode": "allow", "rules": [{"host": "a.test", "paths": ["x"]}]}, "network.rules[0].paths[0]"),
        ({"mode": "allow", "rules": [{"host": "a.test", "protocol": "tcp", "paths": ["/"]}]}, "network.rules[0]"),
        ({"mode": "allow", "rules": [{"host": "a.test", "target": "127.0.0.1:80"}]}, "network.rules[0]"),
        ({"mode": "allow", "rules": [{"host": "*", "internal": True}]}, "network.rules[0]"),
        ({"mode": "allow", "rules": [{"host": "a.test", "allow": True}]}, "network.rules[0].allow"),
        ({"mode": "allow", "trust": "none"}, "network"),
        ({"format": "proctor.network-policy/2"}, "network.format"),
        ([], "network"),
    ],
)
def test_a_wrong_document_is_refused_by_the_field(document: object, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NetworkPolicy.from_json(document)
    assert caught.value.field == field
    assert "\n" not in caught.value.line()


def test_code_cannot_build_what_a_file_could_not() -> None:
    with pytest.raises(ConfigError):
        NetworkPolicy("allow", (Rule("127.0.0.1"),))
    with pytest.raises(ConfigError):
        NetworkPolicy("none", (Rule("a.test"),))


_labels = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
_hosts = st.builds(lambda star, a, b: f"{star}{a}.{b}", st.sampled_from(["", "*."]), _labels, _labels)
_rules = st.builds(
    Rule,
    host=_hosts,
    ports=st.lists(st.integers(1, 65535), min_size=1, max_size=3).map(tuple),
    methods=st.none() | st.just(("GET", "HEAD")),
    paths=st.none() | st.just(("/simple/",)),
    internal=st.booleans(),
)


@given(st.lists(_rules, max_size=5).map(tuple))
def test_documents_survive_the_way_out_and_in(rules: tuple[Rule, ...]) -> None:
    policy = NetworkPolicy("allow", rules)
    again = NetworkPolicy.from_json(policy.as_json())
    assert again == policy
    assert again.digest == policy.digest
