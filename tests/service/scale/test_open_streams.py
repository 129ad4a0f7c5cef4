"""A replica computes for nobody who is gone, and for everybody who is not."""

from __future__ import annotations

from contextlib import ExitStack

from pageturner.service.scale.calls import Call
from pageturner.service.scale.open_streams import OpenStreams


class Processes:
    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.asked: list[str] = []
        self.ended: list[str] = []

    def is_gone(self, name: str) -> bool:
        self.asked.append(name)
        return name in self.gone

    async def end(self, call: Call) -> None:
        self.ended.append(call.request_id)


async def test_streams_of_those_that_are_gone_are_ended() -> None:
    processes = Processes()
    streams = OpenStreams(processes.is_gone, processes.end)
    with ExitStack() as open_streams:
        for number, follower in enumerate(("a", "b", "a", "")):
            open_streams.enter_context(streams.followed(Call(request_id=f"r{number}", follower=follower)))
        with streams.followed(Call(request_id="ended", follower="a")):
            pass
        assert await streams.end_of_gone() == 0
        assert processes.asked == ["a", "b"], "each once, and nobody for what names nobody"
        processes.gone = {"a"}
        assert await streams.end_of_gone() == 2
        assert processes.ended == ["r0", "r2"]
    processes.asked.clear()
    assert await streams.end_of_gone() == 0
    assert not processes.asked, "without a stream nobody is asked for"
