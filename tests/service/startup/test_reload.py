"""A configuration that changes under a running service."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from support.policy_bench import PolicyBench, policy_bench
from support.scripted import recording_logger

from pageturner.policies.spec import PolicySpec
from pageturner.service.config import load_config
from pageturner.service.engine.api import PolicyChange
from pageturner.service.policy_host.reports import PoliciesInfo
from pageturner.service.startup.reload import POLL_SECONDS, ConfigReloader, watch


def write(file: Path, text: str, second: int) -> None:
    """Two writes within the clock's resolution must still be told apart."""
    file.write_text(text)
    os.utime(file, ns=(second * 10**9, second * 10**9))


def policies_of(bench: PolicyBench) -> dict[str, str]:
    return {info.axis: info.name for info in bench.engine.policies().axes}


class Case:
    def __init__(self, file: Path, bench: PolicyBench) -> None:
        self.bench = bench
        self.logger, self.log = recording_logger()
        loaded = load_config(file, {})
        self.refused: list[None] = []
        self.reloader = ConfigReloader(
            bench.engine,
            lambda: load_config(file, {}),
            loaded,
            self.logger,
            lambda: self.refused.append(None),
        )

    @property
    def events(self) -> list[str]:
        return [entry["event"] for entry in self.log]


async def test_the_policies_of_a_changed_file_come_into_force(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    write(file, "[policies]\n", 1)
    async with policy_bench() as bench:
        case = Case(file, bench)
        await case.reloader.poll()
        assert case.events == [], "nothing has changed"
        write(file, '[policies]\nvictim = "last-arrived"\n[policies.shadow]\nqueue = "priority"\n', 2)
        await case.reloader.poll()
        await case.reloader.poll()
        assert case.events == ["reloaded"], "read once"
        assert policies_of(bench)["victim"] == "last-arrived"
        shadow = bench.engine.policies().axes[0].shadow
        assert shadow is not None
        assert shadow.name == "priority"
        write(file, "[policies]\n", 3)
        await case.reloader.poll()
        assert policies_of(bench)["victim"] == "least-computed"
        assert bench.engine.policies().axes[0].shadow is None
        file.unlink()
        await case.reloader.poll()
        assert case.events == ["reloaded", "reloaded"]


async def test_a_reload_obeys_the_file_over_what_was_set_since(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    write(file, '[policies]\nvictim = "last-arrived"\n', 1)
    async with policy_bench() as bench:
        case = Case(file, bench)
        await bench.engine.set_policies(PolicyChange({"queue": PolicySpec("priority")}))
        await case.reloader.reload("SIGHUP")
        assert policies_of(bench)["queue"] == "fcfs"
        assert policies_of(bench)["victim"] == "last-arrived"
        revision = bench.engine.policies().revision
        await case.reloader.reload("SIGHUP")
        assert bench.engine.policies().revision == revision, "nothing had to change"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[policies\n", "is not TOML"),
        ('[policies]\nvictim = "nobody"\nqueue = "priority"\n', "no victim policy 'nobody'"),
        ('[policies]\nqueue = "priority"\n[policies.shadow]\nvictim = "nobody"\n', "policies.shadow.victim"),
        ('[policies]\nqueue = "priority"\n[cache]\nblock_size = 0\n', "cache.block_size"),
    ],
    ids=["not-toml", "no-such-policy", "bad-shadow", "bad-elsewhere"],
)
async def test_a_wrong_configuration_is_refused_whole(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.toml"
    write(file, "", 1)
    async with policy_bench() as bench:
        case, before = Case(file, bench), bench.engine.policies()
        write(file, text, 2)
        await case.reloader.poll()
        assert case.events == ["reload_refused"]
        assert said in case.log[0]["reason"]
        assert bench.engine.policies() == before
        await case.reloader.poll()
        assert case.events == ["reload_refused"], "said once"
        assert len(case.refused) == 1


async def test_what_needs_a_restart_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    write(file, "", 1)
    async with policy_bench() as bench:
        case = Case(file, bench)
        write(file, "[cache]\nblock_size = 8\n[scheduler]\nmax_num_seqs = 3\n", 2)
        await case.reloader.poll()
        assert case.events == ["restart_needed", "reloaded"]
        assert case.log[0]["keys"] == ["cache.block_size", "scheduler.max_num_seqs"]


async def test_the_watch_polls_at_an_interval(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    write(file, "", 1)
    async with policy_bench() as bench:
        case = Case(file, bench)
        sleeps: list[float] = []

        async def sleep(seconds: float) -> None:
            sleeps.append(seconds)
            if len(sleeps) == 2:
                write(file, '[policies]\nvictim = "last-arrived"\n', 2)
            if len(sleeps) == 4:
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await watch([case.reloader], sleep)
        assert sleeps == [POLL_SECONDS] * 4
        assert policies_of(bench)["victim"] == "last-arrived"
        assert isinstance(bench.engine.policies(), PoliciesInfo)
