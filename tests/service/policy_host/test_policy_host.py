"""What a policy may do to its host: raise anything, answer anything, take its time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from support import policy_views
from support.junk_policies import RAISED, Impostor, LyingInt, LyingStr, LyingTuple

from pageturner.policies import registry
from pageturner.policies.events import PolicyEvent, RequestEnded
from pageturner.policies.interfaces import AXES, Admission, BatchSplit, KeyChange, Reclaim
from pageturner.policies.views import BatchView, Rates
from pageturner.service.policy_host.active_policy import FaultLimits
from pageturner.service.policy_host.calls import CallWatch
from pageturner.service.policy_host.host import PolicyHost

LOAD, REQUEST = policy_views.LOAD, policy_views.REQUEST
CANDIDATES = [replace(policy_views.VICTIM, request=policy_views.request(f"r{i}")) for i in range(3)]
BATCH = BatchView(token_budget=8, num_decode_tokens=2, prefill_tokens=(5,), num_waiting=1)
NEVER = FaultLimits(max_faults=1 << 40, max_share=2.0)

ASK: dict[str, Callable[[PolicyHost], object]] = {
    "queue": lambda host: host.queue_key(REQUEST, LOAD),
    "admission": lambda host: host.admission(policy_views.ADMISSION, LOAD),
    "batch": lambda host: host.batch_split(BATCH),
    "victim": lambda host: host.victim_order(CANDIDATES, REQUEST, LOAD),
    "reclaim": lambda host: host.reclaim(policy_views.VICTIM, 1, Rates(), LOAD),
    "eviction": lambda host: host.eviction_score(policy_views.BLOCK),
}


@dataclass(frozen=True)
class Does:
    """Calls `act` whatever it is asked, on any axis, and answers with what that gives."""

    act: Callable[..., Any]
    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME

    def _ask(self, *asked: Any) -> Any:
        return self.act(*asked)

    key = decide = split = rank = choose = score = _ask


class Timer:
    """A clock that only policies move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float, answer: Any) -> Any:
        self.now += seconds
        return answer


def host_of(
    axis: str, policy: object, *, shadow: object = None, watch: CallWatch | None = None, **options: Any
) -> PolicyHost:
    defaults = registry.default_policies()
    chosen: Any = {axis: policy}
    return PolicyHost(
        replace(defaults, **chosen),
        defaults,
        shadows={} if shadow is None else {axis: shadow},
        watch=watch or CallWatch(escapes=()),
        **{"limits": NEVER} | options,
    )


def default_answer(axis: str) -> object:
    return ASK[axis](host_of(axis, registry.create(axis, registry.DEFAULTS[axis])))


def answers(axis: str, answer: Callable[..., Any]) -> tuple[object, int]:
    """What the host makes of it, and the faults that it counted."""
    host = host_of(axis, Does(answer))
    return ASK[axis](host), host.faults[axis]


# --- what is raised -----------------------------------------------------------------------------------


@pytest.mark.fault("I")
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_the_default_answers_where_a_policy_raises(axis: str, error: BaseException) -> None:
    def act(*_: object) -> Any:
        raise error

    assert answers(axis, act) == (default_answer(axis), 1)


@pytest.mark.fault("I")
def test_a_signal_passes_where_the_scheduler_runs_in_the_main_thread() -> None:
    def act(*_: object) -> Any:
        raise KeyboardInterrupt

    host = host_of("queue", Does(act), watch=CallWatch())
    with pytest.raises(KeyboardInterrupt):
        host.queue_key(REQUEST, LOAD)
    assert host.asking() is None


@pytest.mark.fault("I")
def test_an_exception_that_is_raised_again_and_again_gathers_no_frames() -> None:
    error = ValueError("kept by its policy")

    def act(*_: object) -> Any:
        raise error

    host = host_of("queue", Does(act))
    for _ in range(50):
        host.queue_key(REQUEST, LOAD)
    assert error.__traceback__ is None


@pytest.mark.fault("I")
@pytest.mark.parametrize("axis", AXES)
def test_attributes_that_raise_are_faults_of_the_policy(axis: str) -> None:
    class Untouchable:
        def __getattribute__(self, name: str) -> Any:
            raise SystemExit(name)

    host = host_of(axis, Untouchable())
    assert ASK[axis](host) == default_answer(axis)
    assert host.faults[axis] > 0
    assert host.report().axes[AXES.index(axis)].options == {}


# --- what is answered ---------------------------------------------------------------------------------


@pytest.mark.fault("I")
def test_a_victim_policy_cannot_change_the_candidates_that_the_default_ranks() -> None:
    def act(candidates: Any, *_: object) -> Any:
        candidates.clear()
        return []

    order, num_faults = answers("victim", act)
    assert (order, num_faults) == (default_answer("victim"), 1)


@pytest.mark.fault("I")
def test_an_answer_is_read_no_further_than_it_can_be_right() -> None:
    numbers = itertools.count()
    order, num_faults = answers("victim", lambda *_: (f"r{i}" for i in numbers))
    assert (order, num_faults) == (["r0", "r1", "r2"], 1)
    assert next(numbers) == 4, "three candidates, and one more to see that there are more"


@pytest.mark.fault("I")
def test_a_generator_that_names_each_candidate_once_is_a_right_answer() -> None:
    assert answers("victim", lambda *_: iter(["r2", "r0", "r1"])) == (["r2", "r0", "r1"], 0)


@pytest.mark.parametrize(
    ("answer", "order"),
    [
        (["r2", "x", "r0"], ["r2", "r0", "r1"]),
        (["r2", "r2", "r1"], ["r2", "r1", "r0"]),
        (["r2", 7, None], ["r2", "r0", "r1"]),
        ([LyingStr("r2"), LyingStr("r1")], ["r2", "r1", "r0"]),
        ("r2", ["r0", "r1", "r2"]),
        ({"r2": 1, "r1": 2, "r0": 3}, ["r0", "r1", "r2"]),
        ({"r2", "r1", "r0"}, ["r0", "r1", "r2"]),
    ],
    ids=["unknown-id", "twice", "no-text", "subclass", "text", "mapping", "set"],
)
def test_of_a_wrong_order_what_names_candidates_counts(answer: Any, order: list[str]) -> None:
    told, num_faults = answers("victim", lambda *_: answer)
    assert (told, num_faults) == (order, 1)
    assert isinstance(told, list)
    assert all(type(name) is str for name in told)


@pytest.mark.fault("I")
@pytest.mark.parametrize(
    ("axis", "answer", "kept"),
    [
        ("queue", (LyingInt(2), LyingStr("c"), True), (2, "c", 1)),
        ("queue", LyingTuple((1, 2.5)), (1, 2.5)),
        ("batch", BatchSplit(LyingInt(2), LyingInt(3)), BatchSplit(2, 3)),
        ("eviction", True, 1.0),
    ],
    ids=["key", "tuple", "split", "score"],
)
def test_values_of_subclasses_become_values_of_the_built_in_class(axis: str, answer: Any, kept: Any) -> None:
    told, num_faults = answers(axis, lambda *_: answer)
    assert (repr(told), num_faults) == (repr(kept), 0)


NO_ANSWERS: list[tuple[str, Any]] = [
    ("queue", (float("nan"),)),
    ("queue", (1,) * 17),
    ("queue", ("x" * 1025,)),
    ("queue", (1 << 1024,)),
    ("queue", (object(),)),
    ("queue", Impostor(tuple)),
    ("admission", "admit"),
    ("admission", Impostor(Admission)),
    ("reclaim", Impostor(Reclaim)),
    ("batch", BatchSplit(9, 0)),
    ("batch", BatchSplit(0, 0)),
    ("batch", BatchSplit(2, 2, -1)),
    ("batch", Impostor(BatchSplit)),
    ("eviction", "1.5"),
    ("eviction", b"1.5"),
    ("eviction", float("inf")),
    ("eviction", 10**400),
    ("eviction", LyingInt(1)),
    ("victim", itertools.repeat("r0")),
    ("victim", Impostor(list)),
]


@pytest.mark.fault("I")
@pytest.mark.parametrize(
    ("axis", "answer"), NO_ANSWERS, ids=[f"{axis}{i}" for i, (axis, _) in enumerate(NO_ANSWERS)]
)
def test_what_is_no_answer_is_replaced_by_the_default(axis: str, answer: Any) -> None:
    told, num_faults = answers(axis, lambda *_: answer)
    assert (told, num_faults >= 1) == (default_answer(axis), True)


# --- memories -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remembers(Does):
    """As it acts on events, so it remembers."""

    first: Callable[[], Any] = tuple

    def initial_state(self) -> Any:
        return self.first()

    def fold(self, state: Any, event: PolicyEvent) -> Any:
        return self.act(state, event)

    def key(self, *_: object, state: Any = ()) -> Any:
        return (len(state),)


EVENT = RequestEnded(1.0, "r0", "")


@pytest.mark.fault("I")
@pytest.mark.parametrize("rubbish", [None, 7, [], Impostor(tuple)], ids=["none", "int", "list", "impostor"])
def test_an_invalid_memory_is_refused_and_the_previous_one_kept(rubbish: object) -> None:
    states = iter([(1,), rubbish])
    host = host_of("queue", Remembers(lambda *_: next(states)))
    host.fold(EVENT)
    host.fold(EVENT)
    assert host.states["queue"] == (1,)
    assert host.faults["queue"] == 1
    assert host.queue_key(REQUEST, LOAD) == (1,)


@pytest.mark.fault("I")
def test_a_memory_that_cannot_begin_is_a_fault_and_the_policy_answers_without() -> None:
    def fails() -> Any:
        raise SystemExit

    host = host_of("queue", Remembers(lambda *_: (), fails))
    assert host.faults["queue"] == 1
    assert not host.listens
    assert host.queue_key(REQUEST, LOAD) == (0,)


# --- quarantine ---------------------------------------------------------------------------------------


def failing(pattern: str) -> Does:
    """Fails at each x of the pattern, which repeats."""
    marks = itertools.cycle(pattern)
    return Does(lambda *_: (1,) if next(marks) == "." else None)


def num_questions_to_quarantine(policy: object, limit: int = 5000, **options: Any) -> int | None:
    host = host_of("queue", policy, **{"limits": FaultLimits()} | options)
    for count in range(1, limit + 1):
        host.queue_key(REQUEST, LOAD)
        if host.report().axes[0].is_quarantined:
            return count
    return None


@pytest.mark.fault("I")
@pytest.mark.parametrize(
    ("pattern", "num_questions"),
    [
        ("x", 8),
        ("." * 100 + "x" * 100, 108),
        (".x", 16),
        ("...x", 32),
        ("....x", 500),
        ("." * 49 + "x", 5000),
    ],
    ids=["always", "suddenly", "half", "quarter", "fifth", "seldom"],
)
def test_faults_end_in_quarantine_after_a_share_of_the_last_answers_or_a_hundred(
    pattern: str, num_questions: int
) -> None:
    assert num_questions_to_quarantine(failing(pattern)) == num_questions


def test_the_reason_of_a_quarantine_is_told() -> None:
    host = host_of("queue", failing("x"), limits=FaultLimits())
    for _ in range(20):
        host.queue_key(REQUEST, LOAD)
    (told,) = host.take_quarantined()
    assert told.quarantine_reason == "8 of its last 32 answers were bad"
    assert told.num_faults == 8


# --- what the log is told -----------------------------------------------------------------------------


@pytest.mark.fault("I")
def test_faults_are_told_ever_more_seldom_with_what_was_wanted_and_where() -> None:
    def planted_fault(*_: object) -> Any:
        raise ValueError("planted")

    host = host_of("victim", Does(planted_fault))
    for _ in range(100):
        ASK["victim"](host)
    notes = host.take_faults()
    assert [note.num_faults for note in notes] == [1, 2, 4, 8, 16, 32, 64]
    assert notes[0].wanted == "the id of each candidate once"
    assert notes[0].what == "raised ValueError('planted')"
    assert "planted_fault" in notes[0].traceback
    assert host.take_faults() == ()


def test_a_fault_of_a_shadow_is_told_as_such() -> None:
    host = host_of("queue", registry.create("queue", "fcfs"), shadow=failing("x"))
    ASK["queue"](host)
    (note,) = host.take_faults()
    assert (note.is_shadow, note.what, note.traceback) == (True, "answered None", "")
    assert host.faults["queue"] == 0


def test_ranks_of_a_policy_that_was_replaced_are_not_compared_with_those_of_the_next() -> None:
    shadow = registry.create("eviction", "lru")
    host = host_of("eviction", Does(lambda _: 1.0), shadow=shadow)
    compared = []
    for score in (1.0, 5.0):
        host.set_policies(
            replace(host.policies, eviction=Does(lambda _, score=score: score)), host.shadows, ()
        )
        for _ in range(3):
            ASK["eviction"](host)
        report = next(policy.shadow for policy in host.report().axes if policy.axis == "eviction")
        assert report is not None
        compared.append((report.num_compared, report.num_disagreements))
    assert compared == [(2, 0), (4, 0)], "three ranks are two pairs"


@pytest.mark.fault("I")
def test_a_huge_answer_is_quoted_in_few_words() -> None:
    host = host_of("queue", Does(lambda *_: [["x" * 10_000_000] * 1000] * 1000))
    ASK["queue"](host)
    assert len(host.report().axes[0].last_fault) < 250


# --- time ---------------------------------------------------------------------------------------------


def steps_to_quarantine(timer: Timer, seconds: Iterator[float], limit: int = 1000) -> int | None:
    """How many steps of one question, which takes the next of `seconds`, end beyond a budget of 10 ms."""
    policy = Does(lambda *_: timer.take(next(seconds), (1,)))
    host = host_of("queue", policy, watch=CallWatch(timer), budget_seconds=0.010)
    for count in range(1, limit + 1):
        host.queue_key(REQUEST, LOAD)
        for late in host.end_step():
            host.quarantine(late.axis, late.reason)
            assert host.report().axes[0].is_quarantined
            return count
    return None


@pytest.mark.fault("I")
@pytest.mark.parametrize(
    ("seconds", "num_steps"),
    [
        (itertools.repeat(0.009), None),
        (itertools.repeat(0.021), 31),
        (itertools.repeat(30.0), 5),
        (itertools.chain([3600.0], itertools.repeat(0.001)), None),
    ],
    ids=["within", "twice", "far-beyond", "one-stop-of-the-machine"],
)
def test_a_policy_is_late_once_64_steps_took_more_than_64_budgets(
    seconds: Iterator[float], num_steps: int | None
) -> None:
    assert steps_to_quarantine(Timer(), seconds) == num_steps


def test_time_is_reported_by_axis_in_all_and_a_step() -> None:
    timer = Timer()
    host = host_of("victim", Does(lambda *_: timer.take(0.25, ["r0", "r1", "r2"])), watch=CallWatch(timer))
    for _ in range(4):
        ASK["victim"](host)
        ASK["victim"](host)
        host.end_step()
    axes = {info.axis: info for info in host.report().axes}
    assert (axes["victim"].num_calls, axes["victim"].seconds, axes["victim"].step_seconds) == (8, 2.0, 0.5)
    assert axes["queue"].seconds == 0.0


def test_what_a_lazy_answer_takes_to_read_counts() -> None:
    timer = Timer()
    host = host_of(
        "victim", Does(lambda *_: (timer.take(1.0, f"r{i}") for i in range(3))), watch=CallWatch(timer)
    )
    ASK["victim"](host)
    assert host.report().axes[AXES.index("victim")].seconds == 3.0


def test_a_shadow_beyond_its_budget_is_asked_no_more() -> None:
    timer = Timer()
    slow = Does(lambda *_: timer.take(1.0, (1,)))
    host = host_of(
        "queue",
        registry.create("queue", "fcfs"),
        shadow=slow,
        watch=CallWatch(timer),
        budget_seconds=0.010,
    )
    for _ in range(20):
        ASK["queue"](host)
        assert host.end_step() == ()
    shadow = host.report().axes[0].shadow
    assert shadow is not None
    assert (shadow.is_stopped, shadow.seconds) == (True, 5.0)
    assert "10 ms are allowed" in shadow.last_fault


@pytest.mark.fault("I")
def test_another_thread_sees_which_policy_has_not_answered() -> None:
    timer, is_asked, may_answer = Timer(), threading.Event(), threading.Event()

    def hangs(*_: object) -> Any:
        timer.now += 31.0
        is_asked.set()
        may_answer.wait(30)
        return (1,)

    host = host_of("queue", Does(hangs), watch=CallWatch(timer))
    thread = threading.Thread(target=ASK["queue"], args=(host,))
    thread.start()
    assert is_asked.wait(30)
    asking = host.asking()
    assert asking is not None
    assert (asking.axis, asking.seconds) == ("queue", 31.0)
    assert asking.policy.endswith(":Does")
    may_answer.set()
    thread.join(30)
    assert host.asking() is None
