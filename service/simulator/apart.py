"""The servers of a fleet in which some prefill for the others, and their hand-overs."""

from __future__ import annotations

from collections.abc import Callable

from pageturner.policies.interfaces import PolicySet
from pageturner.service.routing.peers import Peers
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.handing_over import DecodeServer, Handovers, Stage
from pageturner.service.simulator.handover import Handover
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.peer_tiers import SimulatedReceiver, SimulatedSender
from pageturner.service.simulator.prefill_replica import PrefillReplica
from pageturner.service.simulator.replica import SchedulerReplica
from pageturner.service.simulator.workload import SimulatedWorkload


def servers_apart(
    workload: SimulatedWorkload,
    machine: SimulatedMachine,
    policies: PolicySet,
    handover: Handover,
    num_decode: int,
    num_prefill: int,
    stage: Stage,
) -> tuple[list[SchedulerReplica], Handovers]:
    """Those that decode, then those that prefill, by their number.

    Raises WorkloadError without a prefix cache, through which blocks are handed over.
    """
    if not machine.cache.enable_prefix_caching:
        raise WorkloadError("prefill apart needs cache.enable_prefix_caching: blocks enter as hits of it")
    prefill_numbers = range(num_decode, num_decode + num_prefill)
    prefilling, decoding = handover.prefilling(machine), handover.decoding(machine)
    decode: dict[int, DecodeServer] = {}
    for number in range(num_decode):
        receiver = SimulatedReceiver(
            handover.receive_blocks,
            machine.block_bytes,
            handover.copy_gbs * 1e9,
            stage.later,
            _waker(stage, number),
        )
        replica = SchedulerReplica(workload, decoding, policies, tier=receiver)
        peers = Peers(prefill_numbers, lambda: stage.now)
        decode[number] = DecodeServer(number, replica, receiver, peers)
    prefill = {
        number: PrefillReplica(workload, prefilling, policies, SimulatedSender(_waker(stage, number)))
        for number in prefill_numbers
    }
    handovers = Handovers(stage, handover, machine.cache.block_size, machine.block_bytes, prefill, decode)
    return [*(server.replica for server in decode.values()), *prefill.values()], handovers


def _waker(stage: Stage, number: int) -> Callable[[], None]:
    return lambda: stage.wake(number)
