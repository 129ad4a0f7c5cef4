"""From names and options to policies, and every way in which that can be wrong."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, ClassVar, Literal

import pytest

from pageturner.policies import registry
from pageturner.policies.errors import (
    PolicyError,
    PolicyLoadError,
    PolicyOptionError,
    UnknownAxisError,
    UnknownPolicyError,
)
from pageturner.policies.interfaces import ALL_AXES, AXES, FLEET_AXES, KeyChange, SortKey
from pageturner.policies.queue import LongestPrefixMatch, PriorityWithAging
from pageturner.policies.registry import OptionDescription
from pageturner.policies.victim import LastArrived
from pageturner.policies.views import BlockView, LoadView, RequestView

# What a third party might write.


@dataclass(frozen=True)
class Oldest:
    """Evicts the block of the oldest id. The rest of the docstring is not its summary."""

    weight: float
    mode: Literal["sum", "max"] = "sum"
    limit: int | None = None
    tags: tuple[str, ...] = field(default_factory=tuple)
    derived: int = field(init=False, default=3)

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError("weight is negative")

    def score(self, block: BlockView) -> float:
        return self.weight * block.block_id


@dataclass
class NotFrozen:
    def score(self, block: BlockView) -> float:
        return 0.0


class NoDataclass:
    def score(self, block: BlockView) -> float:
        return 0.0


@dataclass(frozen=True)
class WrongShape:
    def score(self, block: BlockView, load: LoadView) -> float:
        return 0.0


@dataclass(frozen=True)
class NoKeyChange:
    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return ()


@dataclass(frozen=True)
class Random:
    """Arrival order, said to be random."""

    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return ()


not_a_class = 3


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which this very module can be imported."""
    monkeypatch.setitem(sys.modules, "third_party", sys.modules[__name__])
    return "third_party"


def test_the_defaults_are_those_of_the_design() -> None:
    assert registry.DEFAULTS == {
        "queue": "fcfs",
        "admission": "full-prompt",
        "batch": "decode-first",
        "victim": "least-computed",
        "reclaim": "cost-model",
        "eviction": "segmented-lru",
        "routing": "prefix-aware",
    }
    policies = registry.default_policies()
    in_set = {axis: registry.name_of(getattr(policies, axis)) for axis in AXES}
    assert in_set == {axis: name for axis, name in registry.DEFAULTS.items() if axis not in FLEET_AXES}


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (
            "queue",
            "fcfs priority shortest-job-first longest-prefix-match highest-response-ratio-next"
            " earliest-deadline-first multi-level-feedback virtual-token-counter",
        ),
        ("admission", "full-prompt first-chunk watermark guaranteed-no-evict peak-estimate"),
        ("batch", "decode-first prefill-first equal-progress long-prefill-cap"),
        (
            "victim",
            "least-computed last-arrived lowest-priority most-exclusive longest-remaining most-over-served"
            " fewest-outputs",
        ),
        ("reclaim", "cost-model always-recompute always-swap host-headroom tail-first swap-groups"),
        ("eviction", "segmented-lru lru lfu cost-aware priority-ttl"),
        ("routing", "prefix-aware least-tokens round-robin power-of-two session"),
    ],
)
def test_the_names_that_configurations_may_use(axis: str, expected: str) -> None:
    assert registry.names(axis) == tuple(expected.split())


@pytest.mark.parametrize("axis", ALL_AXES)
def test_every_policy_says_when_it_wins_and_when_it_loses_and_where_it_comes_from(axis: str) -> None:
    for description in registry.describe(axis):
        assert description.summary.startswith("wins ")
        assert "; " in description.summary
        assert len(description.summary) <= 90
        assert "Source" in (registry.find_class(axis, description.name).__doc__ or "")


def test_options_are_described() -> None:
    described = {description.name: description for description in registry.describe("queue")}
    assert described["fcfs"].options == ()
    assert described["longest-prefix-match"].options == (
        OptionDescription("cap_tokens", "int", 4096),
        OptionDescription("aging_tokens_per_second", "float", 256.0),
    )


def test_options_are_set_and_an_int_does_for_a_float() -> None:
    policy = registry.create("queue", "priority", {"aging_seconds": 5})
    assert policy == PriorityWithAging(aging_seconds=5.0)
    assert type(registry.options_of(policy)["aging_seconds"]) is float


def test_a_set_takes_the_defaults_for_axes_left_out() -> None:
    policies = registry.create_set({"victim": "last-arrived", "queue": "longest-prefix-match:cap_tokens=7"})
    assert policies.victim == LastArrived()
    assert policies.queue == LongestPrefixMatch(cap_tokens=7)
    assert policies.reclaim == registry.default_policies().reclaim
    with pytest.raises(UnknownAxisError, match="did you mean 'victim'"):
        registry.create_set({"victims": "last-arrived"})


@pytest.mark.parametrize(
    ("axis", "name", "options", "error", "message"),
    [
        ("queues", "fcfs", {}, UnknownAxisError, "did you mean 'queue'? (there are: queue, admission"),
        (
            "queue",
            "fcsf",
            {},
            UnknownPolicyError,
            "no queue policy 'fcsf'; did you mean 'fcfs'? (there are: fcfs,",
        ),
        ("queue", "lru", {}, UnknownPolicyError, "no queue policy 'lru' (there are: "),
        ("queue", "fcfs", {"x": 1}, PolicyOptionError, "policy 'fcfs': option 'x' is unknown (it has none)"),
        (
            "queue",
            "priority",
            {"aging": 1},
            PolicyOptionError,
            "'aging' is unknown (there are: aging_seconds)",
        ),
        ("queue", "priority", {"aging_seconds": "5"}, PolicyOptionError, "must be float, not '5' (str)"),
        ("queue", "priority", {"aging_seconds": True}, PolicyOptionError, "must be float, not True (bool)"),
        ("queue", "priority", {"aging_seconds": None}, PolicyOptionError, "must be float, not None"),
        ("queue", "priority", {"aging_seconds": 0}, PolicyOptionError, "must be above 0, not 0.0"),
        ("queue", "priority", {"aging_seconds": float("nan")}, PolicyOptionError, "must be finite"),
        ("queue", "priority", {"aging_seconds": float("inf")}, PolicyOptionError, "must be finite"),
        ("queue", "priority", {"aging_seconds": 10**400}, PolicyOptionError, "is out of range"),
        (
            "queue",
            "longest-prefix-match",
            {"cap_tokens": 1.0},
            PolicyOptionError,
            "must be int, not 1.0 (float)",
        ),
        (
            "queue",
            "longest-prefix-match",
            {"cap_tokens": True},
            PolicyOptionError,
            "must be int, not True (bool)",
        ),
        (
            "queue",
            "longest-prefix-match",
            {"cap_tokens": -1},
            PolicyOptionError,
            "must be at least 0, not -1",
        ),
        ("admission", "full-prompt", {"skip": 1}, PolicyOptionError, "must be bool, not 1 (int)"),
        ("admission", "peak-estimate", {"output_fraction": 1.1}, PolicyOptionError, "must be at most 1"),
    ],
)
def test_what_is_wrong_is_named(
    axis: str, name: str, options: dict[str, object], error: type[PolicyError], message: str
) -> None:
    with pytest.raises(error) as caught:
        registry.create(axis, name, options)
    assert message in str(caught.value)


def test_a_policy_is_created_by_the_path_of_its_class(here: str) -> None:
    policy = registry.create(
        "eviction", f"{here}:Oldest", {"weight": 2, "mode": "max", "limit": 4, "tags": ("a",)}
    )
    assert policy == Oldest(2.0, "max", 4, ("a",))
    assert policy.score(BlockView(3, 0, 0, 0.0, "", 0)) == 6.0
    assert registry.options_of(policy) == {"weight": 2.0, "mode": "max", "limit": 4, "tags": ("a",)}
    assert registry.name_of(policy) == f"{__name__}:Oldest"
    assert registry.create("queue", f"{here}:Random") == Random()


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("Oldest", {}, PolicyOptionError, "option 'weight' is required"),
        ("Oldest", {"weight": 1, "derived": 2}, PolicyOptionError, "'derived' is unknown"),
        (
            "Oldest",
            {"weight": 1, "mode": "min"},
            PolicyOptionError,
            "must be Literal['sum', 'max'], not 'min'",
        ),
        ("Oldest", {"weight": 1, "limit": 1.5}, PolicyOptionError, "must be int | None, not 1.5"),
        ("Oldest", {"weight": -1}, PolicyLoadError, "refuses its options: weight is negative"),
        ("NotFrozen", {}, PolicyLoadError, "is not a frozen dataclass"),
        ("NoDataclass", {}, PolicyLoadError, "is not a frozen dataclass"),
        ("WrongShape", {}, PolicyLoadError, "has no method score(self, block: 'BlockView') -> 'float'"),
        ("Random", {}, PolicyLoadError, "has no method score"),
        ("not_a_class", {}, PolicyLoadError, "is not a class"),
        ("Missing", {}, PolicyLoadError, "module 'third_party' has no 'Missing'"),
    ],
)
def test_what_is_wrong_with_a_class_from_outside_is_named(
    here: str, name: str, options: dict[str, object], error: type[PolicyError], message: str
) -> None:
    with pytest.raises(error) as caught:
        registry.create("eviction", f"{here}:{name}", options)
    assert message in str(caught.value)


def test_a_queue_policy_must_say_when_its_key_changes(here: str) -> None:
    with pytest.raises(PolicyLoadError, match="does not say when its key changes"):
        registry.create("queue", f"{here}:NoKeyChange")


@pytest.mark.parametrize("path", ["no_such_module:X", ":X", ".relative:X"])
def test_a_module_that_cannot_be_imported(path: str) -> None:
    with pytest.raises(PolicyLoadError, match="cannot import"):
        registry.create("queue", path)


def test_a_module_that_fails_at_import(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_at_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PolicyLoadError, match="'fails_at_import': ZeroDivisionError: division by zero"):
        registry.create("queue", "fails_at_import:X")


@pytest.fixture
def plugins(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three entry points of other packages on the eviction axis, one of them under a name that is taken."""
    group = "pageturner.policies.eviction"
    installed = EntryPoints(
        [
            EntryPoint("oldest", f"{here}:Oldest", group),
            EntryPoint("broken", f"{here}:Missing", group),
            EntryPoint("lru", f"{here}:Oldest", group),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: installed.select(group=group))


@pytest.mark.usefixtures("plugins")
def test_entry_points_add_names_and_take_none() -> None:
    built_in = ("segmented-lru", "lru", "lfu", "cost-aware", "priority-ttl")
    assert registry.names("eviction") == (*built_in, "broken", "oldest")
    assert registry.names("queue") == tuple(cls.name for cls in registry.BUILT_IN["queue"])
    assert registry.create("eviction", "oldest", {"weight": 1.0}) == Oldest(1.0)
    assert registry.name_of(registry.create("eviction", "lru")) == "lru"
    with pytest.raises(PolicyLoadError, match="its entry point third_party:Missing cannot be loaded"):
        registry.create("eviction", "broken")


def test_a_policy_without_a_summary_is_described_by_its_docstring(
    here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = EntryPoint("oldest", f"{here}:Oldest", "pageturner.policies.eviction")
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([plugin]).select(group=group))
    described = registry.describe("eviction")[-1]
    assert described.name == "oldest"
    assert (
        described.summary
        == "Evicts the block of the oldest id. The rest of the docstring is not its summary."
    )
    assert described.options == (
        OptionDescription("weight", "float", None, required=True),
        OptionDescription("mode", "Literal['sum', 'max']", "sum"),
        OptionDescription("limit", "int | None", None),
        OptionDescription("tags", "tuple[str, ...]", ()),
    )
