"""The requests that decode together on a coarse replica: each step gives every one of them a token."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class Job:
    """A request on a coarse replica.

    num_known: tokens of prompt and answer; while it decodes the batch knows better. num_computed: of those,
    while it is prefilled. last_step: the batch's count of steps at which it ends, once it decodes. digests:
    its chain, of which it holds the first num_chunks while it runs. num_cached: prompt tokens found in the
    cache when it first started; below 0 before that.
    """

    index: int
    num_prompt: int
    num_output: int
    digests: tuple[int, ...]
    num_known: int
    num_computed: int = 0
    last_step: int = 0
    num_chunks: int = 0
    num_cached: int = -1


class DecodeBatch:
    """context: tokens that the next step reads, of all together."""

    def __init__(self) -> None:
        self.context = 0
        self._num_steps = 0
        self._jobs: list[tuple[int, int, Job]] = []  # by last_step, then index: a heap

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def steps_to_an_end(self) -> int:
        """Steps until the first of them ends; there must be one."""
        return self._jobs[0][0] - self._num_steps

    def add(self, job: Job) -> None:
        """One that has its first token, and lacks others."""
        job.last_step = self._num_steps + job.num_prompt + job.num_output - job.num_known
        self.context += job.num_known
        heapq.heappush(self._jobs, (job.last_step, job.index, job))

    def advance(self, steps: int) -> list[Job]:
        """So many steps are done; who ends, in order."""
        ended = []
        self._num_steps += steps
        self.context += steps * len(self._jobs)
        while self._jobs and self._jobs[0][0] <= self._num_steps:
            job = heapq.heappop(self._jobs)[2]
            job.num_known = job.num_prompt + job.num_output
            self.context -= job.num_known
            ended.append(job)
        return ended

    def shortest(self) -> tuple[int, Job] | None:
        """Who has fewest tokens, of equals who came last, and how many; None where nothing decodes."""
        jobs = (entry[2] for entry in self._jobs)
        return min(
            ((self._num_known(job), job) for job in jobs),
            key=lambda found: (found[0], -found[1].index),
            default=None,
        )

    def remove(self, job: Job) -> None:
        """It decodes no more, before its end."""
        self._jobs.remove((job.last_step, job.index, job))
        heapq.heapify(self._jobs)
        job.num_known = self._num_known(job)
        self.context -= job.num_known

    def _num_known(self, job: Job) -> int:
        return job.num_prompt + job.num_output - (job.last_step - self._num_steps)
