"""Planted bugs: each replaces one method of the core (or of the cache) by a plausible mistake.

`caught_by` names the invariants that may expose it, as their assertions begin. The test runs the general
machine on each and demands that one of them does, within a fixed number of examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.beam_search import BeamGroup
from pageturner.service.core.memory.block import Release
from pageturner.service.core.memory.block_manager import BlockManager, blocks_for
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.chains import Chains
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.outputs import BlockCopies, BlockCopy
from pageturner.service.core.request import Request, RequestStatus, Sequence
from pageturner.service.core.scheduling import attempt as attempt_module
from pageturner.service.core.scheduling.beams import BeamProcessor
from pageturner.service.core.scheduling.committer import Committer
from pageturner.service.core.scheduling.ledger import Ledger
from pageturner.service.core.scheduling.step_plan import PlannedAdmission, Preemption
from pageturner.service.core.scheduling.transitions import Transitions
from pageturner.service.model.kv_cache import KvCache
from support.scheduler_machine import (
    AdaptedMachine,
    ConversingMachine,
    SchedulerMachine,
    SearchingMachine,
)


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """owner.method is replaced by `mistake(original)`.

    favoured_request, favoured_policies: as SchedulerMachine's, for a mistake that only a rare load shows.
    machine: the one that finds it. seed: of the first search for it; one that finds it, since a rare mistake
    takes twenty searches on average. When the machine changes, another may be the one.
    """

    name: str
    owner: Any
    method: str
    mistake: Callable[[Any], Any]
    caught_by: str
    favoured_request: tuple[tuple[str, Any], ...] = ()
    favoured_policies: tuple[tuple[str, str], ...] = ()
    machine: type[SchedulerMachine] = SchedulerMachine
    seed: int = 0


def _skip_one_release(original: Any) -> Any:
    def free(self: BlockManager, sequence: Sequence, release: Release) -> None:
        table = self.tables.pop(sequence.seq_id, ())
        for block_id in reversed(table[1:]):
            self.device.release(block_id, release)

    return free


def _swap_without_copy(original: Any) -> Any:
    def swap_out(self: BlockManager, request: Request, release: Release) -> tuple[BlockCopy, ...]:
        original(self, request, release)
        return ()

    return swap_out


def _cache_known_tokens(original: Any) -> Any:
    def cache_full_blocks(self: BlockManager, sequence: Sequence) -> None:
        held = self.num_blocks(sequence) * self.block_size
        sequence.num_accepted_tokens = min(len(sequence.tokens), held)
        original(self, sequence)

    return cache_full_blocks


def _cache_when_scheduled(original: Any) -> Any:
    def schedule(self: Committer, chunk: Any, step_id: int) -> Any:
        part = original(self, chunk, step_id)
        sequence = chunk.sequence
        sequence.num_accepted_tokens = min(sequence.num_kv_tokens, len(sequence.tokens))
        self._manager.cache_full_blocks(sequence)
        return part

    return schedule


def _keep_mapping_of_evicted(original: Any) -> Any:
    def evict(self: BlockPool) -> int:
        before = dict(self._chains._block_of_hash)
        block_id = original(self)
        self._chains._block_of_hash = before
        return int(block_id)

    return evict


def _twin_takes_over(original: Any) -> Any:
    def cache_block(
        self: BlockPool, block_id: int, block_hash: bytes, *, depth: int, parent: int | None
    ) -> int:
        block = self._blocks[block_id]
        block.block_hash, block.depth = block_hash, depth
        self._chains._block_of_hash[block_hash] = block_id
        return block_id

    return cache_block


def _twin_is_kept(original: Any) -> Any:
    def cache_full_blocks(self: BlockManager, sequence: Sequence) -> None:
        if not self.caches_prefixes:
            return
        for index in range(sequence.num_cached_blocks, sequence.num_accepted_tokens // self.block_size):
            parent = self.device.lookup(self.block_hash(sequence, index - 1)) if index else None
            own, block_hash = self.table(sequence)[index], self.block_hash(sequence, index)
            self.device.cache_block(own, block_hash, depth=index, parent=parent)
            sequence.num_cached_blocks = index + 1

    return cache_full_blocks


def _chains_lose_their_heads(original: Any) -> Any:
    def chain_end(self: BlockPool, block: Any) -> Any:
        return block

    return chain_end


def _swap_ins_last(original: Any) -> Any:
    def apply(self: KvCache, copies: BlockCopies) -> None:
        original(self, BlockCopies(copies.clears, copies.swap_outs, (), copies.copies))
        original(self, BlockCopies(swap_ins=copies.swap_ins))

    return apply


def _copy_on_write_without_copy(original: Any) -> Any:
    def prepare_write(self: BlockManager, *arguments: Any) -> None:
        original(self, *arguments)

    return prepare_write


def _write_in_shared_block(original: Any) -> Any:
    def prepare_write(self: BlockManager, *arguments: Any) -> None:
        return None

    return prepare_write


def _fork_without_reference(original: Any) -> Any:
    def fork(self: BlockManager, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        self.tables[child.seq_id] = self.tables[parent.seq_id][: blocks_for(num_tokens, self.block_size)]

    return fork


def _same_epoch_after_preemption(original: Any) -> Any:
    def reset(self: Sequence, num_kv_tokens: int, block_size: int) -> None:
        original(self, num_kv_tokens, block_size)
        self.epoch -= 1

    return reset


def _no_fence(original: Any) -> Any:
    def release(self: BlockPool, block_id: int, release: Release) -> None:
        original(self, block_id, Release(0, release.now, release.tenant, release.priority))

    return release


def _hash_without_parent(original: Any) -> Any:
    def extend(self: PrefixHasher, parent: bytes, token_ids: Any) -> bytes:
        return bytes(original(self, b"", token_ids))

    return extend


def _hash_without_adapter(original: Any) -> Any:
    def root(self: PrefixHasher, *, adapter: str, salt: str, tenant: str = "") -> bytes:
        return bytes(original(self, adapter="", salt=salt, tenant=tenant))

    return root


def _tail_keeps_its_progress(original: Any) -> Any:
    def preempt(self: Transitions, preemption: Preemption, step_id: int) -> Any:
        progress = {s.seq_id: s.num_kv_tokens for s in preemption.request.unfinished}
        copies = original(self, preemption, step_id)
        if preemption.how is Reclaim.TAIL:
            for sequence in preemption.request.unfinished:
                sequence.set_kv(progress[sequence.seq_id])
        return copies

    return preempt


def _victim_is_lost(original: Any) -> Any:
    def requeue(self: Transitions, request: Request, status: RequestStatus) -> None:
        self._state.running.pop(request.order, None)
        request.status = status

    return requeue


def _abort_keeps_host_blocks(original: Any) -> Any:
    def drop_host(self: BlockManager, request: Request, release: Release) -> None:
        if any(not sequence.is_finished for sequence in request.sequences):
            original(self, request, release)

    return drop_host


def _shared_blocks_count_as_freed(original: Any) -> Any:
    def drop(self: Ledger, block_ids: Any, *, in_flight: bool) -> None:
        blocks = list(block_ids)
        original(self, blocks, in_flight=in_flight)
        self.available += sum(self.references(block_id) > 0 for block_id in blocks)

    return drop


def _rewrite_of_a_cached_token(original: Any) -> Any:
    def set_kv(self: Sequence, num_kv_tokens: int) -> None:
        original(self, num_kv_tokens)
        self.num_kv_tokens = self.num_computed_tokens

    return set_kv


def _claims_unpinned(original: Any) -> Any:
    def pin(self: BlockManager, block_ids: Any) -> None:
        return None

    return pin


def _sharing_lost_in_swap(original: Any) -> Any:
    def swap_out(self: BlockManager, request: Request, release: Release) -> Any:
        copies = original(self, request, release)
        for sequence in request.unfinished[1:]:
            table = self._host_tables.get(sequence.seq_id, ())
            if len(table) > 1:
                self._host_tables[sequence.seq_id] = (table[1], *table[1:])
        return copies

    return swap_out


def _poisoned_blocks_stay_cached(original: Any) -> Any:
    def forget(self: BlockManager, sequence: Sequence, first_index: int) -> tuple[int, ...]:
        return ()

    return forget


def _result_of_the_dead(original: Any) -> Any:
    def book(ledger: Ledger, manager: BlockManager, preemption: Preemption, last_ended_step: int) -> None:
        original(ledger, manager, preemption, last_ended_step + 1)

    return book


def _partial_beyond_what_was_computed(original: Any) -> Any:
    def cache_partial_block(self: BlockManager, sequence: Sequence) -> None:
        sequence.num_accepted_tokens = len(sequence.tokens)
        if len(sequence.tokens) <= self.num_blocks(sequence) * self.block_size:
            original(self, sequence)

    return cache_partial_block


def _partial_counts_as_full(original: Any) -> Any:
    def num_full_claims(self: PlannedAdmission, seq_id: int) -> int:
        return len(self.claims[seq_id])

    return num_full_claims


def _partial_of_other_tokens(original: Any) -> Any:
    def partial_hash(self: BlockManager, sequence: Sequence, index: int, num_tokens: int) -> bytes:
        assert self.hasher is not None
        return self.hasher.extend(self.block_hash(sequence, index - 1), (num_tokens,))

    return partial_hash


def _partial_length_is_kept(original: Any) -> Any:
    def remove_length(self: Chains, parent_hash: bytes, num_tokens: int) -> None:
        return None

    return remove_length


def _beam_shares_full_blocks_only(original: Any) -> Any:
    def branch(self: BeamProcessor, parent: Sequence, child: Sequence) -> None:
        original(self, parent, child)
        num_full = child.num_kv_tokens // self._manager.block_size
        self._manager.truncate(child, num_full, Release())

    return branch


def _beam_takes_tokens_without_their_blocks(original: Any) -> Any:
    def branch(self: BeamProcessor, parent: Sequence, child: Sequence) -> None:
        tokens = list(child.tokens)
        original(self, parent, child)
        child.tokens[: len(tokens)] = tokens

    return branch


def _told_before_it_is_settled(original: Any) -> Any:
    def settle(self: BeamProcessor, request: Request, group: BeamGroup, events: Any) -> None:
        shared = request.num_shared_tokens
        request.num_shared_tokens = min(shared + 1, len(request.sequences[0].tokens))
        original(self, request, group, events)
        request.num_shared_tokens = shared

    return settle


ONE_LONG_PROMPT = (("prompt", (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2)), ("salt", ""), ("bypass", False))
CHOICES = (("n", 2),)
SWAPS_UNDER_PRESSURE = (("admission", "first-chunk"), ("reclaim", "always-swap"))

PLANTED_BUGS = (
    PlantedBug("skipped-decref", BlockManager, "free", _skip_one_release, "reference-count|progress"),
    PlantedBug("swap-without-copy", BlockManager, "swap_out", _swap_without_copy, "tokens"),
    PlantedBug(
        "cached-before-computed",
        BlockManager,
        "cache_full_blocks",
        _cache_known_tokens,
        "tokens|write",
        ONE_LONG_PROMPT,
    ),
    PlantedBug("cached-when-scheduled", Committer, "_schedule", _cache_when_scheduled, "tokens|write"),
    PlantedBug("stale-map-entry", BlockPool, "_evict", _keep_mapping_of_evicted, "bijection"),
    PlantedBug("twin-takes-over", BlockPool, "cache_block", _twin_takes_over, "bijection"),
    PlantedBug(
        "twin-kept",
        BlockManager,
        "cache_full_blocks",
        _twin_is_kept,
        "chain",
        (("prompt", (0,) * 6), ("salt", "")),
    ),
    PlantedBug(
        "chain-evicted-from-its-head",
        BlockPool,
        "_chain_end",
        _chains_lose_their_heads,
        "chain",
        favoured_policies=(("eviction", "lfu"),),
        seed=1,
    ),
    PlantedBug(
        "swap-in-after-copies", KvCache, "apply", _swap_ins_last, "tokens", CHOICES, SWAPS_UNDER_PRESSURE
    ),
    PlantedBug(
        "cow-without-copy", BlockManager, "prepare_write", _copy_on_write_without_copy, "tokens", seed=1
    ),
    PlantedBug("write-in-shared-block", BlockManager, "prepare_write", _write_in_shared_block, "write"),
    PlantedBug(
        "fork-without-reference",
        BlockManager,
        "fork",
        _fork_without_reference,
        "reference-count|is released more often than it was taken",
    ),
    PlantedBug(
        "epoch-not-raised", Sequence, "reset", _same_epoch_after_preemption, "tokens|IndexError|progress"
    ),
    PlantedBug("pending-ignored", BlockPool, "release", _no_fence, "pending"),
    PlantedBug("hash-without-parent", PrefixHasher, "extend", _hash_without_parent, "tokens|inspection"),
    PlantedBug(
        "tail-keeps-progress", Transitions, "preempt", _tail_keeps_its_progress, "tokens|write|IndexError"
    ),
    PlantedBug("victim-lost", Transitions, "requeue", _victim_is_lost, "status"),
    PlantedBug(
        "abort-keeps-host-blocks",
        BlockManager,
        "drop_host",
        _abort_keeps_host_blocks,
        "leak",
        favoured_policies=SWAPS_UNDER_PRESSURE,
    ),
    PlantedBug(
        "shared-counted-as-freed",
        Ledger,
        "drop",
        _shared_blocks_count_as_freed,
        "OutOfBlocks",
        ONE_LONG_PROMPT,
        SWAPS_UNDER_PRESSURE,
    ),
    PlantedBug(
        "cached-token-rewritten", Sequence, "set_kv", _rewrite_of_a_cached_token, "write|tokens|OutOfBlocks"
    ),
    PlantedBug(
        "sharing-lost-in-swap",
        BlockManager,
        "swap_out",
        _sharing_lost_in_swap,
        "tokens|reference",
        CHOICES,
        SWAPS_UNDER_PRESSURE,
    ),
    PlantedBug(
        "fence-forgotten-in-plan", attempt_module, "book_preemption", _result_of_the_dead, "OutOfBlocks"
    ),
    PlantedBug(
        "partial-beyond-computed",
        BlockManager,
        "cache_partial_block",
        _partial_beyond_what_was_computed,
        "tokens|write",
        machine=ConversingMachine,
        seed=239,
    ),
    PlantedBug(
        "partial-counted-as-full",
        PlannedAdmission,
        "num_full_claims",
        _partial_counts_as_full,
        "tokens|cached|write|IndexError",
        machine=ConversingMachine,
        seed=1,
    ),
    PlantedBug(
        "partial-of-other-tokens",
        BlockManager,
        "_partial_hash",
        _partial_of_other_tokens,
        "tokens",
        machine=ConversingMachine,
        seed=209,
    ),
    PlantedBug(
        "hash-without-adapter",
        PrefixHasher,
        "root",
        _hash_without_adapter,
        "tokens",
        machine=AdaptedMachine,
    ),
    PlantedBug(
        "partial-length-kept",
        Chains,
        "_remove_length",
        _partial_length_is_kept,
        "partial",
        machine=ConversingMachine,
    ),
    PlantedBug(
        "beam-shares-full-blocks-only",
        BeamProcessor,
        "_branch",
        _beam_shares_full_blocks_only,
        "tokens|IndexError|write",
        machine=SearchingMachine,
    ),
    PlantedBug(
        "beam-takes-tokens-without-their-blocks",
        BeamProcessor,
        "_branch",
        _beam_takes_tokens_without_their_blocks,
        "tokens|beams",
        machine=SearchingMachine,
    ),
    PlantedBug(
        "told-before-it-is-settled",
        BeamProcessor,
        "_settle",
        _told_before_it_is_settled,
        "tokens",
        machine=SearchingMachine,
    ),
)
