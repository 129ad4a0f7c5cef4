"""`pageturner bench cache --only tiers`: conversations that exceed the pool, with tiers or without.

Each conversation has a history of its own; together they take ten times the pool. They have their turns one
after the other, so that between two turns of one all others' blocks pass through the pool. A turn's prompt is
all that came before, and a few new tokens. Time to first token counts from the second turn on, when a server
could know the history.

Four servers are asked the same: without tiers; with a host tier that holds all; with one that holds little
and a disk; and on the folder of that one, after it was stopped, a server that has just started. Then one
is killed between two turns while its blocks are being written, and another starts on what it left.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pageturner.service.client import FinishedEvent, SyncClient, TokenEvent
from pageturner.service.client.server_process import running_server

BLOCK_SIZE = 16
POOL_SHARE = 10
"""How many times the pool the conversations take."""

ANSWER_TOKENS, NEW_TOKENS = 16, 32
_TOKEN_IDS = range(1000, 20_000)
NUM_SERVERS = 5


@dataclass(frozen=True, slots=True)
class TierLoad:
    """num_conversations, each of history_tokens before its first turn, have num_turns each."""

    num_conversations: int = 14
    history_tokens: int = 1024
    num_turns: int = 2
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Of all conversations, when the last turn begins."""
        grown = (self.num_turns - 1) * (ANSWER_TOKENS + NEW_TOKENS)
        return self.num_conversations * (self.history_tokens + grown)

    @property
    def num_blocks(self) -> int:
        """Of the pool: a tenth of what the conversations take, and no less than one of them does at last."""
        most_turns = self.num_turns * (NUM_SERVERS - 1)
        one = -(-(self.history_tokens + most_turns * (ANSWER_TOKENS + NEW_TOKENS)) // BLOCK_SIZE)
        return max(self.num_tokens // BLOCK_SIZE // POOL_SHARE, one + 1)


@dataclass(frozen=True, slots=True)
class TierFigures:
    """ttft_first, ttft_p50: medians of the first turns and of those behind, in seconds. cached_share: of the
    prompts of those behind. host_hit_tokens, disk_hit_tokens: copied back, and read from disk before."""

    name: str
    ttft_first: float
    ttft_p50: float
    cached_share: float
    host_hit_tokens: int
    disk_hit_tokens: int
    num_disk_blocks: int
    num_damaged: int


@dataclass(slots=True)
class Conversations:
    """What was said so far, by conversation. A server that has just started goes on where another ended."""

    load: TierLoad
    said: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.load.seed)
        self.said = [
            draw.choices(_TOKEN_IDS, k=self.load.history_tokens) for _ in range(self.load.num_conversations)
        ]

    def turn(self, client: SyncClient, index: int) -> tuple[float, float]:
        """Take one turn: seconds to its first token, and the share of its prompt that was cached."""
        said = self.said[index]
        said += random.Random(f"{self.load.seed}/{index}/{len(said)}").choices(_TOKEN_IDS, k=NEW_TOKENS)
        sent = time.perf_counter()
        first, share, num_prompt = 0.0, 0.0, len(said)
        options = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
        with client.stream(list(said), **options) as events:  # type: ignore[arg-type] # of several kinds
            for event in events:
                if isinstance(event, TokenEvent):
                    first = first or time.perf_counter() - sent
                    said += [token.token_id for token in event.tokens]
                elif isinstance(event, FinishedEvent):
                    share = event.usage.num_cached_prompt_tokens / num_prompt
        return first, share


def measure_tiers(
    load: TierLoad, arguments: Sequence[str], on_run: Callable[[str], object]
) -> tuple[TierFigures, ...]:
    """The five servers in their order. Raises PageturnerError if a request fails."""
    pool = [f"--num-blocks={load.num_blocks}", "--swap-space=0", *arguments]
    found = []
    with tempfile.TemporaryDirectory(prefix="pageturner-tiers-") as folder:
        disk = ["--host-cache-memory=64MiB", f"--disk-cache-folder={Path(folder) / 'cache'}"]
        cases: tuple[tuple[str, list[str], bool], ...] = (
            ("device only", [], False),
            ("host tier", ["--host-cache-memory=1GiB"], False),
            ("host and disk", disk, False),
            ("started on that folder", disk, True),
        )
        said = Conversations(load)
        for name, flags, goes_on in cases:
            said = said if goes_on else Conversations(load)
            found.append(_serve(name, [*pool, *flags], said, load.num_turns))
            on_run(f"{name}: TTFT p50 {found[-1].ttft_p50:.3f} s")
        _kill(pool + disk, said)
        found.append(_serve("started after kill -9", [*pool, *disk], said, load.num_turns))
        on_run(f"{found[-1].name}: TTFT p50 {found[-1].ttft_p50:.3f} s")
    return tuple(found)


def _serve(name: str, flags: Sequence[str], conversations: Conversations, num_turns: int) -> TierFigures:
    with running_server(flags) as server, SyncClient(server.target) as client:
        first, later, shares = [], [], []
        for number in range(num_turns):
            for index in range(len(conversations.said)):
                seconds, share = conversations.turn(client, index)
                if number == 0:
                    first.append(seconds)
                else:
                    later.append(seconds)
                    shares.append(share)
        load = client.load()
    return TierFigures(
        name,
        statistics.median(first),
        statistics.median(later),
        statistics.mean(shares),
        load.num_host_hit_tokens_total,
        load.num_disk_hit_tokens_total,
        load.num_disk_blocks_cached,
        load.num_disk_reads_failed_total,
    )


def _kill(flags: Sequence[str], conversations: Conversations) -> None:
    """Serve a turn of each conversation, and kill the server in the middle of the last."""
    with running_server(flags) as server, SyncClient(server.target) as client:
        *others, last = range(len(conversations.said))
        for index in others:
            conversations.turn(client, index)
        events = client.stream(list(conversations.said[last]), max_tokens=ANSWER_TOKENS, ignore_eos=True)
        next(iter(events))  # it is taken, and computes
        os.kill(server.pid, signal.SIGKILL)
        events.close()
