"""`pageturner policies show`: what it says of each axis, on a terminal of 80 columns."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine
from support.serving import serving

from pageturner.service.cli import _command_parser
from pageturner.service.commands import policy_changes
from pageturner.service.policy_host.reports import PoliciesInfo, PolicyInfo, ShadowInfo

HANGING = PolicyInfo(
    "queue",
    "my_policies:Mine",
    {"patience": 3},
    (),
    is_quarantined=True,
    num_faults=8,
    last_fault="raised SystemExit(1)",
    shadow=ShadowInfo(
        "priority", {"aging_seconds": 60.0}, 7, 2, (), 0, "took 80 ms", 1.0, 0.5, is_stopped=True
    ),
    quarantine_reason="8 of its last 32 answers were bad",
    num_calls=1000,
    seconds=0.25,
    step_seconds=0.0125,
    asking_seconds=31.4,
)


@pytest.mark.fault("I", "K")
async def test_show_tells_time_faults_and_what_hangs_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    engine = FakeEngine()
    engine.policies_info = PoliciesInfo(3, (HANGING,))
    async with serving(engine) as served:
        policy_changes._print(await served.client.policies(), as_json=False)
    out = capsys.readouterr().out
    for told in (
        "QUARANTINED",
        "why: 8 of its last 32 answers were bad",
        "HANGS: asked 31 s ago",
        "250.0 us a call, 12.500 ms a step; 1000 calls",
        "8 bad answers, the last: raised SystemExit(1)",
        "shadow is asked no more: took 80 ms",
    ):
        assert told in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.fault("K")
@pytest.mark.parametrize(
    "words",
    [
        ["set", "--target", "host:1", "victim=lru"],
        ["set", "victim=lru", "--target", "host:1"],
        ["--target", "host:1", "set", "victim=lru"],
    ],
)
def test_flags_of_set_stand_before_or_after_its_words(words: list[str]) -> None:
    arguments = _command_parser("policies").parse(words)
    assert (arguments.words, arguments.target) == (["set", "victim=lru"], "host:1")
