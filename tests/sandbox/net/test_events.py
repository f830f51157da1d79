"""The record of a network is bounded, whatever a candidate does, and counts everything."""

from __future__ import annotations

from proctor.sandbox.net.events import KEPT, NetworkEvent, Recorder


def test_a_flood_is_counted_and_not_kept() -> None:
    got: list[NetworkEvent] = []
    clock = [0.0]
    recorder = Recorder(got.append, clock=lambda: clock[0])
    for number in range(10_000):
        recorder.add(NetworkEvent("lookup", 0.0, decision="refused", reason="unlisted", name=f"n{number}.test"))
    assert len(got) == 2000
    assert len(recorder.kept) == KEPT
    clock[0] = 5.0
    recorder.add(NetworkEvent("lookup", 5.0, name="last.test"))
    assert [event.kind for event in got[-2:]] == ["dropped", "lookup"]
    assert got[-2].count == 8000
    assert recorder.counts.as_json()["lookups_refused"] == 10_000
    assert recorder.counts.unrecorded == 8000


def test_texts_and_names_are_bounded() -> None:
    recorder = Recorder()
    for number in range(500):
        recorder.add(NetworkEvent("connection", 0.0, name=f"n{number}.test", path="/" + "x" * 100_000))
    assert all(len(event.path) <= 512 for event in recorder.kept)
    names = recorder.counts.as_json()["connections_by_name"]
    assert len(names) == 201
    assert names["(others)"] == 300


def test_reasons_are_bounded_and_all_are_counted() -> None:
    """The number of a look-up's type is in its reason, and a program may choose any."""
    recorder = Recorder()
    for number in range(65_536):
        recorder.add(NetworkEvent("lookup", 0.0, decision="refused", reason=f"type-{number}"))
    reasons = recorder.counts.as_json()["reasons"]
    assert len(reasons) == 201
    assert sum(reasons.values()) == 65_536


def test_a_listener_that_fails_does_not_stop_the_record() -> None:
    def fail(_: NetworkEvent) -> None:
        raise RuntimeError("full")

    recorder = Recorder(fail)
    recorder.add(NetworkEvent("lookup", 0.0))
    assert len(recorder.kept) == 1
