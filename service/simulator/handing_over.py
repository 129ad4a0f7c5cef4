"""Hand-overs under way in a simulated fleet: who is asked for a prompt, what came of it, and what then.

It does what `handover.RemotePrefill` and the engine's `PrefillService` do between two processes: a request
goes to its decoding server's scheduler once its blocks lie there, or will not come. Whatever fails costs time
and no request.

    decode: take_in    which blocks are lacking, and who is to compute them
            _ask    ---- link ---->  prefill: _reach   a request of one token
                                              _pump    each block, once it is made, in its place in the line
            _come   <--- link -----           _left
            _over   <--- link -----           _answer  all came, or no more will, or it failed
    then the next server is asked for the rest, or the request goes to the scheduler
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Protocol

from pageturner.service.core.missing_blocks import missing_blocks
from pageturner.service.routing.peers import Peer, Peers, longest_seconds
from pageturner.service.simulator.handover import Handover, Links
from pageturner.service.simulator.peer_tiers import SimulatedReceiver
from pageturner.service.simulator.prefill_replica import PrefillReplica
from pageturner.service.simulator.replica import SchedulerReplica


class Stage(Protocol):
    """What the fleet does for hand-overs. Servers by their number."""

    @property
    def now(self) -> float:
        """The virtual clock."""
        ...

    def later(self, at: float, action: Callable[[], None]) -> None:
        """Do something then; of one moment in the order in which it was asked for."""
        ...

    def wake(self, number: int) -> None:
        """A server that does nothing looks for something to do."""
        ...

    def submit(self, index: int, at: float, number: int) -> None:
        """A request goes to a server's scheduler. at: when it arrived."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeServer:
    """A server that has prompts computed. receiver: what stands behind its host tier."""

    number: int
    replica: SchedulerReplica
    receiver: SimulatedReceiver
    peers: Peers[int]


@dataclass(slots=True)
class HandoverCounts:
    """num_calls: of a prompt, each server that was asked. num_failed: that did not give it, one way or the
    other. num_blocks: that came."""

    num_calls: int = 0
    num_failed: int = 0
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class _TakeIn:
    """A request before its scheduler has it. missing: hashes of the blocks that it lacks, behind
    `num_before` others. asked: who was, each once."""

    index: int
    at: float
    server: DecodeServer
    missing: Sequence[bytes]
    num_before: int
    asked: set[Peer[int]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Call:
    """One server that was asked for blocks of a prompt, of these hashes, behind `num_before` others.

    heard_at: when a block came last. ends_at: when all of them must have. settled: by hash, whether the block
    may be sent. num_left: blocks that have left. has_ended, has_failed: the request there. is_answered: no
    more is sent. is_over: and that is known where it was asked.
    """

    take_in: _TakeIn
    hashes: Sequence[bytes]
    num_before: int
    peer: Peer[int]
    pump: Callable[[_Call], None]
    heard_at: float
    ends_at: float
    settled: dict[bytes, bool] = field(default_factory=dict)
    num_left: int = 0
    is_sending: bool = False
    has_ended: bool = False
    has_failed: bool = False
    is_answered: bool = False
    is_over: bool = False

    def settle(self, block_hash: bytes, *, is_there: bool) -> None:
        """As of `peer_tiers.Reader`."""
        self.settled.setdefault(block_hash, is_there)
        self.pump(self)


class Handovers:
    """prefill: the servers that compute prompts, by number; decode: those that have them computed."""

    def __init__(
        self,
        stage: Stage,
        handover: Handover,
        block_size: int,
        block_bytes: int,
        prefill: dict[int, PrefillReplica],
        decode: dict[int, DecodeServer],
    ) -> None:
        self.counts = HandoverCounts()
        self.lost: set[int] = set()
        self._stage = stage
        self._options = handover
        self._block_size = block_size
        self._links = Links(block_bytes / (handover.link_gbs * 1e9))
        self._prefill = prefill
        self._decode = decode
        self._calls: dict[tuple[int, int], _Call] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way, nor reckoned to be."""
        peers = (peer for server in self._decode.values() for peer in server.peers)
        return not self._calls and not any(peer.num_tokens for peer in peers)

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens that the servers that prefill had cached."""
        return sum(replica.num_hit_tokens for replica in self._prefill.values())

    def take_in(self, index: int, at: float, number: int) -> None:
        """A request came to a server that decodes, which has what it lacks of the prompt computed, if that is
        worth it, and then gives it to its scheduler."""
        self._ask(self._look(index, at, self._decode[number]))

    def ended(self, number: int, index: int, *, has_failed: bool) -> None:
        """A request of one token ended on a server that prefills."""
        call = self._calls.get((number, index))
        if call is not None:
            call.has_ended, call.has_failed = True, has_failed
            self._pump(call)

    def lose(self, number: int) -> None:
        """A server that prefills is no more; who waits for it hears of that."""
        self.lost.add(number)
        for key in [key for key in self._calls if key[0] == number]:
            call = self._calls.pop(key)
            call.is_answered = True
            self._tell_end(call, has_failed=True)

    # --- where it is decoded ---------------------------------------------------------------

    def _look(self, index: int, at: float, server: DecodeServer) -> _TakeIn:
        """Which blocks of the prompt are to be had."""
        options, tokens = self._options, server.replica.new_request(index, at).prompt_token_ids
        if len(tokens) <= options.min_tokens:
            return _TakeIn(index, at, server, (), 0)
        hashes = server.replica.hashes(tokens[:-1])
        wanted = missing_blocks(
            hashes,
            server.replica.num_held(hashes),
            server.receiver,
            num_tokens=len(tokens),
            block_size=self._block_size,
            min_tokens=options.min_tokens,
        )
        return _TakeIn(index, at, server, wanted.hashes, wanted.num_here)

    def _ask(self, wanted: _TakeIn) -> None:
        stage, server = self._stage, wanted.server
        peer = server.peers.choose(wanted.asked) if wanted.missing else None
        if peer is None:
            stage.submit(wanted.index, wanted.at, server.number)
            return
        wanted.asked.add(peer)
        num_tokens, patience = len(wanted.missing) * self._block_size, self._options.patience_seconds
        peer.num_tokens += num_tokens
        self.counts.num_calls += 1
        rates, num_context = server.replica.rates, wanted.num_before * self._block_size
        ends_at = stage.now + longest_seconds(rates, patience, num_tokens, num_context)
        call = _Call(wanted, wanted.missing, wanted.num_before, peer, self._pump, stage.now, ends_at)
        stage.later(stage.now + self._options.link_seconds, lambda: self._reach(call))
        stage.later(stage.now + patience, lambda: self._listen(call))

    def _come(self, call: _Call, block_hash: bytes) -> None:
        """A block is here."""
        if not call.is_over:
            call.heard_at = self._stage.now
            call.take_in.server.receiver.put(block_hash)
            self.counts.num_blocks += 1

    def _listen(self, call: _Call) -> None:
        """Whether nothing came for too long, or not all."""
        if call.is_over:
            return
        patient_until = min(call.heard_at + self._options.patience_seconds, call.ends_at)
        if self._stage.now < patient_until:
            self._stage.later(patient_until, lambda: self._listen(call))
            return
        self._stage.later(self._stage.now + self._options.link_seconds, lambda: self._leave(call))
        self._over(call, has_failed=True)

    def _over(self, call: _Call, *, has_failed: bool) -> None:
        """The call has ended. What it gave is good: another server is asked for the rest where it failed."""
        if call.is_over:
            return
        call.is_over = True
        wanted, server = call.take_in, call.take_in.server
        call.peer.num_tokens -= len(call.hashes) * self._block_size
        if not has_failed:
            server.peers.succeeded(call.peer)
            self._stage.submit(wanted.index, wanted.at, server.number)
            return
        self.counts.num_failed += 1
        server.peers.failed(call.peer, "", is_refusal=False)
        missing = list(dropwhile(server.receiver.holds, wanted.missing))
        wanted.num_before += len(wanted.missing) - len(missing)
        wanted.missing = missing
        self._ask(wanted)

    # --- where it is prefilled -------------------------------------------------------------

    def _reach(self, call: _Call) -> None:
        wanted, number = call.take_in, call.peer.server
        if call.is_over:
            return
        if number in self.lost:
            call.is_answered = True
            self._tell_end(call, has_failed=True)
            return
        replica = self._prefill[number]
        num_tokens = (call.num_before + len(call.hashes)) * self._block_size
        self._calls[number, wanted.index] = call
        replica.prefill(wanted.index, num_tokens, wanted.at, self._stage.now)
        self._stage.wake(number)
        replica.sender.open(call, call.hashes)

    def _pump(self, call: _Call) -> None:
        """Send the next block, if it is there and none is on the line."""
        wanted, number = call.take_in, call.peer.server
        if call.is_sending or call.is_answered:
            return
        if call.num_left == len(call.hashes):
            self._answer(call, has_failed=False)
            return
        block_hash = call.hashes[call.num_left]
        is_there = call.settled.get(block_hash)
        if is_there:
            call.is_sending = True
            left_at = self._links.send(number, wanted.server.number, self._stage.now)
            self._stage.later(left_at, lambda: self._left(call, block_hash))
        elif is_there is not None or call.has_failed:
            self._answer(call, has_failed=is_there is None)

    def _left(self, call: _Call, block_hash: bytes) -> None:
        """A block is off the line."""
        call.is_sending = False
        if call.is_answered:
            return
        call.num_left += 1
        self._prefill[call.peer.server].sender.give_up(call, block_hash)
        self._stage.later(self._stage.now + self._options.link_seconds, lambda: self._come(call, block_hash))
        self._pump(call)

    def _answer(self, call: _Call, *, has_failed: bool) -> None:
        """The last word of the server that was asked."""
        self._leave(call)
        self._tell_end(call, has_failed=has_failed)

    def _tell_end(self, call: _Call, *, has_failed: bool) -> None:
        told_at = self._stage.now + self._options.link_seconds
        self._stage.later(told_at, lambda: self._over(call, has_failed=has_failed))

    def _leave(self, call: _Call) -> None:
        """Nothing more is wanted of it: neither blocks nor the computation."""
        if call.is_answered:
            return
        call.is_answered = True
        wanted, number = call.take_in, call.peer.server
        replica = self._prefill[number]
        for block_hash in call.hashes[call.num_left :]:
            replica.sender.give_up(call, block_hash)
        if self._calls.pop((number, wanted.index), None) is not None and not call.has_ended:
            replica.cancel(wanted.index)
            self._stage.wake(number)
