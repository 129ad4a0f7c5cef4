"""Requests whose readers lag are given up in time, and none because the process itself stood still."""

from __future__ import annotations

from pageturner.service.engine.paused_requests import PausedRequests


def test_a_request_is_given_up_after_its_time_and_a_quarter() -> None:
    paused = PausedRequests(seconds=2.0)
    paused.pause("a", until=10.0)
    assert paused.take_late(9.9) == []
    assert paused.take_late(10.0) == []
    assert list(paused.moments()) == [10.5]
    assert paused.take_late(10.4) == []
    assert paused.take_late(10.5) == ["a"]
    assert list(paused.moments()) == []


def test_a_process_that_stood_still_hears_of_readers_before_it_gives_them_up() -> None:
    """Its clock went on; what its readers did in that time has not come across yet."""
    paused = PausedRequests(seconds=2.0)
    paused.pause("a", until=10.0)
    assert paused.take_late(1000.0) == []
    assert paused.forget("a")
    assert paused.take_late(2000.0) == []


def test_who_is_paused_again_has_all_of_the_time_again() -> None:
    paused = PausedRequests(seconds=2.0)
    paused.pause("a", until=10.0)
    assert paused.take_late(10.0) == []
    assert paused.forget("a")
    assert not paused.forget("a")
    paused.pause("a", until=12.2)
    assert paused.take_late(12.2) == []
    assert paused.take_late(12.7) == ["a"]
