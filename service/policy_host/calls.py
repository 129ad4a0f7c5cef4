"""One policy, called: everything it raises is caught, its time is measured, its memory is kept."""

from __future__ import annotations

import math
import reprlib
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pageturner.policies import registry
from pageturner.policies.events import PolicyEvent
from pageturner.policies.interfaces import KeyChange, Migrating, is_stateful
from pageturner.policies.spec import PolicySpec
from pageturner.service.policy_host.reports import Asking

QUESTIONS: Mapping[str, str] = {
    "queue": "key",
    "admission": "decide",
    "batch": "split",
    "victim": "rank",
    "reclaim": "choose",
    "eviction": "score",
    "routing": "route",
}
"""The method that answers for each axis."""

NUM_AVERAGED_STEPS = 64
SIGNALS = (KeyboardInterrupt, SystemExit)
"""What Python and this program's handlers raise for a signal, in the main thread and only there."""
MAX_SHOWN_CHARACTERS = 200
MAX_TRACEBACK_CHARACTERS = 4000
MAX_TRACEBACK_FRAMES = 16
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MAX_SHOWN_CHARACTERS
_MAX_STEP_BUDGETS = 16
"""One step counts for no more than this many budgets, so that a stopped machine quarantines nothing."""

_T = TypeVar("_T")


class BadAnswer(Exception):
    """An answer that cannot be followed."""

    def __init__(self, answer: object) -> None:
        super().__init__(f"answered {shown(answer)}")


class PolicyCallFailed(Exception):
    """A policy raised, or gave a bad answer. what: in words. cause: what was raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause
        self.what = str(cause) if type(cause) is BadAnswer else f"raised {shown(cause)}"

    def traceback(self) -> str:
        """Where it was raised, of bounded length; empty for an answer that is merely wrong."""
        if type(self.cause) is BadAnswer:
            return ""
        try:
            lines = traceback.format_exception(self.cause, limit=-MAX_TRACEBACK_FRAMES)
            return "".join(lines)[-MAX_TRACEBACK_CHARACTERS:]
        except BaseException as error:  # its own __str__ may raise anything
            return f"its traceback raised {type(error).__name__}"

    def release(self) -> None:
        """Let go of the frames: an exception that a policy raises again and again would gather them all."""
        BaseException.with_traceback(self.cause, None)


class CallWatch:
    """Times the calls of a host's policies, and tells any other thread which one is under way.

    timer: a monotonic clock in seconds; None to measure nothing.
    escapes: exceptions that are no policy's, and pass through a call. By default SIGNALS, as in a simulator
    whose scheduler runs in the main thread: Ctrl-C is raised there in the midst of whatever runs. None in an
    engine's thread: no signal reaches it and its shutdown is a command, so whatever is raised during a call
    is the policy's doing, SystemExit and KeyboardInterrupt included.
    """

    __slots__ = ("_call", "escapes", "timer")

    def __init__(
        self,
        timer: Callable[[], float] | None = None,
        escapes: tuple[type[BaseException], ...] = SIGNALS,
    ) -> None:
        self.timer = timer or _no_time
        self.escapes = escapes
        self._call: tuple[str, str, float] | None = None

    def begin(self, axis: str, policy: str) -> float:
        """A call begins; the moment."""
        now = self.timer()
        self._call = (axis, policy, now)
        return now

    def end(self, began: float) -> float:
        """The call has ended; the seconds it took."""
        self._call = None
        return self.timer() - began

    def asking(self) -> Asking | None:
        """The call under way. From any thread."""
        call = self._call
        return None if call is None else Asking(call[0], call[1], self.timer() - call[2])


class CallTimes:
    """Seconds that one policy took: in all, and a step on average over the last NUM_AVERAGED_STEPS."""

    __slots__ = ("_steps", "_this_step", "num_calls", "seconds")

    def __init__(self) -> None:
        self.num_calls = 0
        self.seconds = 0.0
        self._this_step = 0.0
        self._steps: deque[float] = deque(maxlen=NUM_AVERAGED_STEPS)

    def add(self, seconds: float) -> None:
        self.num_calls += 1
        self.seconds += seconds
        self._this_step += seconds

    def end_step(self, budget_seconds: float) -> bool:
        """Whether the last NUM_AVERAGED_STEPS took more than their budgets together."""
        self._steps.append(min(self._this_step, _MAX_STEP_BUDGETS * budget_seconds))
        self._this_step = 0.0
        return math.fsum(self._steps) > NUM_AVERAGED_STEPS * budget_seconds

    @property
    def step_seconds(self) -> float:
        return math.fsum(self._steps) / len(self._steps) if self._steps else 0.0


class PolicyCaller:
    """Calls one policy. A stateful one is passed its state, which only `fold` and `inherit` change.

    Call `start_memory` before all else.
    on_memory_fault: told of a memory that raised or gave what is no state; the one of before is kept then.
    """

    __slots__ = (
        "_answer",
        "_axis",
        "_fold",
        "_on_memory_fault",
        "_watch",
        "key_change",
        "policy",
        "spec",
        "state",
        "times",
    )

    def __init__(
        self, axis: str, policy: Any, watch: CallWatch, on_memory_fault: Callable[[PolicyCallFailed], None]
    ) -> None:
        self.policy = policy
        self.spec = safe_spec(policy)
        self.times = CallTimes()
        self.key_change = _key_change(policy)
        self._axis = axis
        self._watch = watch
        self._on_memory_fault = on_memory_fault
        self._answer: Callable[..., Any] = _method(policy, QUESTIONS[axis])
        self._fold: Callable[[Any, PolicyEvent], Any] | None = None
        self.state: Any = None

    def start_memory(self) -> None:
        """Ask for the state to begin with; one that fails to give any answers as one without a memory."""
        if not _quietly(lambda: is_stateful(self.policy), otherwise=True):
            return
        try:
            self.state, self._fold = self._called(self._first_memory)
        except PolicyCallFailed as fault:
            self._on_memory_fault(fault)

    @property
    def has_memory(self) -> bool:
        return self._fold is not None

    def ask(self, parse: Callable[[Any], _T], *arguments: object) -> _T:
        """What `parse` makes of the policy's answer. Raises PolicyCallFailed, whatever either raises."""
        if self._fold is None:
            return self._called(lambda: parse(self._answer(*arguments)))
        return self._called(lambda: parse(self._answer(*arguments, state=self.state)))

    def fold(self, event: PolicyEvent) -> None:
        """Tell the memory, if there is one."""
        fold = self._fold
        if fold is None:
            return
        try:
            self.state = self._called(lambda: self._checked(fold(self.state, event)))
        except PolicyCallFailed as fault:
            self._on_memory_fault(fault)

    def inherit(self, predecessor: PolicyCaller, history: Iterable[PolicyEvent]) -> None:
        """Take over from the policy before it, by the rule of `policies.interfaces.Stateful`.

        history: the live requests, told as events to a memory that begins anew.
        """
        if self._fold is None:
            return
        if predecessor.has_memory:
            try:
                inherited = self._called(lambda: self._inherited(predecessor))
            except PolicyCallFailed as fault:
                self._on_memory_fault(fault)
            else:
                if inherited is not None:
                    self.state = inherited
                    return
        for event in history:
            self.fold(event)

    def _first_memory(self) -> tuple[Any, Callable[[Any, PolicyEvent], Any]]:
        return self.policy.initial_state(), self.policy.fold

    def _inherited(self, predecessor: PolicyCaller) -> Any:
        if self.policy == predecessor.policy:
            return self._checked(predecessor.state)
        if not isinstance(self.policy, Migrating):
            return None
        migrated = self.policy.migrate(predecessor.state)
        return None if migrated is None else self._checked(migrated)

    def _checked(self, state: Any) -> Any:
        """A state is of the class of the state before: anything else no policy of ours made."""
        if issubclass(type(state), type(self.state)):
            return state
        raise BadAnswer(state)

    def _called(self, call: Callable[[], _T]) -> _T:
        began = self._watch.begin(self._axis, self.spec.name)
        try:
            return call()
        except self._watch.escapes:
            raise
        except BaseException as error:
            raise PolicyCallFailed(error) from None
        finally:
            self.times.add(self._watch.end(began))


def safe_spec(policy: object) -> PolicySpec:
    """`registry.spec_of`, whatever the policy does; an option that is no plain value is its repr."""
    try:
        options = {name: _plain(value) for name, value in registry.options_of(policy).items()}
    except BaseException:  # an attribute that raises: the name will do
        options = {}
    return PolicySpec(str(registry.name_of(policy)), options)


def shown(answer: object) -> str:
    """An answer in words, of bounded length; not even its repr is trusted."""
    try:
        return _SHORT.repr(answer)[:MAX_SHOWN_CHARACTERS]
    except BaseException:
        return f"a {type(answer).__name__} that has no repr"


def _plain(value: object) -> object:
    if type(value) is tuple or type(value) is list:
        return type(value)(map(_plain, value))
    return value if value is None or type(value) in (bool, int, float, str) else shown(value)


def _key_change(policy: object) -> KeyChange:
    change = _quietly(lambda: getattr(policy, "key_change", None), otherwise=None)
    return change if type(change) is KeyChange else KeyChange.WITH_TIME


def _quietly(look: Callable[[], _T], *, otherwise: _T) -> _T:
    """What a look at a policy's attributes finds; looking may raise anything."""
    try:
        return look()
    except BaseException:
        return otherwise


def _method(policy: object, name: str) -> Callable[..., Any]:
    """The policy's method; where looking it up raises, one that raises the same at each call."""
    try:
        method: Callable[..., Any] = getattr(policy, name)
    except BaseException as error:
        fault = error

        def method(*_: object, **__: object) -> Any:
            raise fault

    return method


def _no_time() -> float:
    return 0.0
