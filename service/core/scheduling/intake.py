"""Refuses, at submit, what could never be served."""

from __future__ import annotations

from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduling import views
from pageturner.service.errors import InvalidArgument, QueueFull


def check_queue(options: SchedulerOptions, num_waiting: int, num_queued_tokens: int, num_tokens: int) -> None:
    """Raise QueueFull unless a prompt of num_tokens may join num_waiting requests with num_queued_tokens."""
    if num_waiting >= options.max_waiting:
        raise QueueFull(f"{num_waiting} requests are waiting already", retry_after_seconds=1.0)
    num_queued = num_queued_tokens + num_tokens
    if num_waiting and num_queued > options.max_queued_tokens:
        raise QueueFull(f"{num_queued} prompt tokens would be waiting", retry_after_seconds=1.0)


def checked_max_tokens(new: NewRequest, options: SchedulerOptions, num_blocks: int, block_size: int) -> int:
    """The max_tokens in force: as asked, or what fits if none was asked.

    A request must fit the pool alone, at its peak, or it would wait for ever with all behind it. Raises
    InvalidArgument naming the field that makes it too large.
    """
    num_prompt = len(new.prompt_token_ids)
    n = new.params.n
    if num_prompt == 0:
        raise InvalidArgument("prompt", "has no tokens")
    if n > min(options.max_n, options.max_num_seqs):
        raise InvalidArgument("n", f"{n} is over the limit of {min(options.max_n, options.max_num_seqs)}")
    room = options.max_model_len - num_prompt
    if room < 1:
        raise InvalidArgument(
            "prompt",
            f"{num_prompt} tokens leave no room to generate; max_model_len is {options.max_model_len}",
        )
    if views.num_peak_blocks(num_prompt, 1, n, block_size) > num_blocks:
        raise InvalidArgument(
            "prompt", f"{num_prompt} tokens never fit the cache of {num_blocks} blocks of {block_size}"
        )
    asked = new.params.max_tokens
    if asked is not None and asked > room:
        raise InvalidArgument(
            "max_tokens",
            f"{asked} and a prompt of {num_prompt} tokens exceed max_model_len {options.max_model_len}",
        )
    wanted = room if asked is None else asked
    fitting = _largest_fitting(num_prompt, wanted, n, num_blocks, block_size)
    if asked is not None and fitting < asked:
        raise InvalidArgument(
            "max_tokens",
            f"{asked} for each of {n} choices never fits the cache of {num_blocks} blocks of {block_size}; "
            f"at most {fitting} would",
        )
    if fitting < new.params.min_tokens:
        raise InvalidArgument("min_tokens", f"{new.params.min_tokens} is more than the {fitting} that fit")
    return fitting


def _largest_fitting(num_prompt: int, wanted: int, n: int, num_blocks: int, block_size: int) -> int:
    """The largest max_tokens up to `wanted` whose peak fits; by bisection, since the peak only grows."""
    low, high = 1, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if views.num_peak_blocks(num_prompt, middle, n, block_size) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
