"""Steps on the model: each is started, and finished when its tokens are wanted. One at a time.

`DirectSteps` computes in the caller's thread. A GPU goes on by itself once a step is started, and the caller
waits for it in `finish`; a CPU is done when `start` returns. `ThreadedSteps` gives the CPU's caller the same
freedom, by a thread of its own that computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pageturner.service.core.outputs import BlockCopies, SampledSequence, SchedulerOutput

Logits = TypeVar("Logits")
LogitsOut = TypeVar("LogitsOut", covariant=True)
LogitsIn = TypeVar("LogitsIn", contravariant=True)


class BlockStore(Protocol):
    """Where KV lives: carries out the block traffic of a step."""

    def apply(self, copies: BlockCopies) -> None: ...


class Runner(Protocol[LogitsOut]):
    """The model: computes every scheduled token, returns logits of the rows to be sampled."""

    def forward(self, output: SchedulerOutput) -> LogitsOut: ...

    def note_sampled(self, sampled: tuple[SampledSequence, ...]) -> None:
        """What the step that ran last sampled, for a step that was planned before it was known."""
        ...


class Sampler(Protocol[LogitsIn]):
    """Logits to tokens, one result for each row."""

    def sample(self, logits: LogitsIn, output: SchedulerOutput) -> tuple[SampledSequence, ...]: ...


class Masks(Protocol):
    """Finds out, beside the forward, what rows may sample that are bound to a form."""

    def begin(self, output: SchedulerOutput) -> None:
        """The forward of this step comes next."""
        ...

    def close(self) -> None:
        """The last call."""
        ...


class Device(Protocol):
    """What the model computes on."""

    def adopt_thread(self) -> None:
        """Called once by the thread that will compute, before all else."""
        ...

    def synchronize(self) -> None:
        """Return when all that was enqueued is done. Raises if the device can't go on."""
        ...


class StepComputation(Protocol):
    """Carries out steps, in their order; each is finished before the next is started."""

    def start(self, output: SchedulerOutput) -> None:
        """Begin to carry out a step."""
        ...

    def finish(self) -> tuple[SampledSequence, ...]:
        """The tokens of the step that was started. Raises what the step raised, wherever it did."""
        ...

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Carry out the block traffic of a step that computes nothing. No step is under way."""
        ...

    def close(self) -> None:
        """The last call: waits for a step under way, whose tokens are given up."""
        ...


class DirectSteps(Generic[Logits]):
    """Computes where it is called. masks: what the sampler asks for masks, if it does."""

    def __init__(
        self,
        kv_cache: BlockStore,
        runner: Runner[Logits],
        sampler: Sampler[Logits],
        masks: Masks | None = None,
    ) -> None:
        self._kv_cache = kv_cache
        self._runner = runner
        self._sampler = sampler
        self._masks = masks
        self._started: tuple[SchedulerOutput, Logits | None, Exception | None] | None = None

    def start(self, output: SchedulerOutput) -> None:
        assert self._started is None, "a step is under way"
        logits, error = None, None
        try:
            self._kv_cache.apply(output.block_copies)
            if output.scheduled:
                if self._masks is not None:
                    self._masks.begin(output)
                logits = self._runner.forward(output)
        except Exception as failure:  # it is the step's; the one before it may still have to be accounted for
            error = failure
        self._started = output, logits, error

    def finish(self) -> tuple[SampledSequence, ...]:
        assert self._started is not None, "no step is under way"
        (output, logits, error), self._started = self._started, None
        if error is not None:
            raise error
        sampled = () if logits is None else self._sampler.sample(logits, output)
        self._runner.note_sampled(sampled)
        return sampled

    def copy_blocks(self, copies: BlockCopies) -> None:
        self._kv_cache.apply(copies)

    def close(self) -> None:
        self._started = None
        if self._masks is not None:
            self._masks.close()


class ThreadedSteps:
    """Computes in a thread of its own, so that the caller plans and accounts meanwhile.

    All that `steps` does happens in that thread: a second team of OpenMP threads would slow both down.
    Raises RuntimeError if the system refuses the thread.
    """

    def __init__(self, steps: StepComputation) -> None:
        self._steps = steps
        self._calls: queue.SimpleQueue[Callable[[], tuple[SampledSequence, ...]] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[SampledSequence, ...] | BaseException] = queue.SimpleQueue()
        # A step that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="pageturner-model", daemon=True)
        self._thread.start()

    def start(self, output: SchedulerOutput) -> None:
        def compute() -> tuple[SampledSequence, ...]:
            self._steps.start(output)
            return self._steps.finish()

        self._give(compute)

    def finish(self) -> tuple[SampledSequence, ...]:
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def copy_blocks(self, copies: BlockCopies) -> None:
        def copy() -> tuple[SampledSequence, ...]:
            self._steps.copy_blocks(copies)
            return ()

        self._give(copy)
        self.finish()

    def close(self) -> None:
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _give(self, call: Callable[[], tuple[SampledSequence, ...]]) -> None:
        """Have a call made in the thread that computes; `finish` waits for it."""
        self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                outcome: tuple[SampledSequence, ...] | BaseException = call()
            except BaseException as error:  # raised where it is waited for
                outcome = error
            self._outcomes.put(outcome)
            del call, outcome  # no tensor of a step outlives it here
        self._steps.close()
