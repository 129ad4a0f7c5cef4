"""What `pageturner policies new` writes: a policy of each axis that works, and its test."""

from __future__ import annotations

from collections.abc import Mapping

TEST = '''"""CLASS keeps the contract of its axis, and does what it is for."""

from MODULE import CLASS

from pageturner.policies.testing import check_policy


def test_it_keeps_the_contract_of_its_axis() -> None:
    check_policy("AXIS", CLASS())
'''

_HEAD = '''"""{question}

A policy is a frozen dataclass: its fields are its options, checked against their types. It answers from the
views that it is shown (pageturner/policies/{views} says what each field means) and from nothing else: no
clock, no random numbers, nothing kept. The same question must get the same answer.
"""

from __future__ import annotations

{imports}

@dataclass(frozen=True, slots=True)
class CLASS:
    """What it does, and when it wins."""

'''


def _skeleton(question: str, imports: str, body: str, views: str = "views.py") -> str:
    return _HEAD.format(question=question, imports=imports, views=views) + body


SKELETONS: Mapping[str, str] = {
    "queue": _skeleton(
        "In which order do waiting, preempted and swapped requests get their turn?",
        """from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.interfaces import KeyChange, SortKey
from pageturner.policies.views import LoadView, RequestView
""",
        '''    # NEVER: a key stays. WITH_REQUEST: it follows the request's progress. WITH_TIME: or time.
    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    seconds_per_priority: float = 60.0

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        """Smallest first: a tuple of numbers and texts that compares with that of any other request."""
        return (request.arrival_time - request.priority * self.seconds_per_priority,)
''',
    ),
    "admission": _skeleton(
        "May the request whose turn it is start now?",
        """from dataclasses import dataclass

from pageturner.policies.interfaces import Admission
from pageturner.policies.views import AdmissionView, LoadView
""",
        '''    spare_blocks: int = 0

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        """ADMIT; or WAIT, which holds those behind it too; or SKIP, which lets them try."""
        needed = candidate.num_blocks_known + candidate.watermark_blocks + self.spare_blocks
        return Admission.ADMIT if needed <= load.device.num_available else Admission.WAIT
''',
    ),
    "batch": _skeleton(
        "How is the token budget of one step split between decoding and prefilling?",
        """from dataclasses import dataclass

from pageturner.policies.interfaces import BatchSplit
from pageturner.policies.views import BatchView
""",
        '''    max_chunk_tokens: int = 256

    def split(self, batch: BatchView) -> BatchSplit:
        """Shares within the budget, so that some of the work that there is gets done."""
        decode_tokens = min(batch.num_decode_tokens, batch.token_budget)
        return BatchSplit(decode_tokens, batch.token_budget - decode_tokens, max(1, self.max_chunk_tokens))
''',
    ),
    "victim": _skeleton(
        "Who yields when blocks or slots run out?",
        """from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.policies.views import LoadView, RequestView, VictimView
""",
        '''    heeds_priority: bool = True

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        """Each candidate's id once, the first to yield first, however they are listed."""

        def order(victim: VictimView) -> tuple[int, float, str]:
            request = victim.request
            return request.priority if self.heeds_priority else 0, -request.arrival_time, request.request_id

        return [victim.request.request_id for victim in sorted(candidates, key=order)]
''',
    ),
    "reclaim": _skeleton(
        "How does a victim yield: swapped to the host, recomputed later, or its tail only?",
        """from dataclasses import dataclass

from pageturner.policies.interfaces import Reclaim
from pageturner.policies.views import LoadView, Rates, VictimView
""",
        '''    min_swap_tokens: int = 64

    def choose(self, victim: VictimView, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        """SWAP only with host room, TAIL only where the tail ends the shortage; RECOMPUTE always can be."""
        has_room = victim.num_blocks <= load.host.num_available
        is_long = victim.num_recompute_tokens >= self.min_swap_tokens
        return Reclaim.SWAP if has_room and is_long else Reclaim.RECOMPUTE
''',
    ),
    "eviction": _skeleton(
        "Which cached block is overwritten first?",
        """from dataclasses import dataclass

from pageturner.policies.views import BlockView
""",
        '''    seconds_per_hit: float = 60.0

    def score(self, block: BlockView) -> float:
        """Smallest is evicted first. Asked once, as the block is released, so best a time."""
        return block.released_at + self.seconds_per_hit * block.num_hits
''',
    ),
    "routing": _skeleton(
        "Which replica takes a request, where several servers share the load?",
        """from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.policies.fleet import Draw, FleetView, RoutedRequest
""",
        '''    max_tokens_behind: float = 4096.0

    def route(self, request: RoutedRequest, fleet: FleetView, draw: Draw) -> Sequence[str]:
        """Ids of replicas, the best first: one at least. Chance is draw(n), a number of range(n)."""
        least, drawn = fleet.least_loaded(), fleet[draw(len(fleet))]
        chosen = drawn if drawn.load <= least.load + self.max_tokens_behind else least
        return [chosen.replica_id]
''',
        views="fleet.py",
    ),
}
