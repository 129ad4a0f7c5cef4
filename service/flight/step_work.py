"""What a step makes the machine do, in numbers that its time can be told from."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.core.outputs import SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step does.

    num_steps: 1 for a step with a forward, 0 for one that only moves blocks. num_sequences: of the batch.
    num_tokens: computed. num_samples: rows of logits. num_read_tokens: KV positions read, summed over the
    sequences. num_attended_pairs: (query token, position it attends to), summed over the tokens.
    num_swapped_out, num_swapped_in, num_copied: blocks.
    """

    num_steps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    num_read_tokens: int = 0
    num_attended_pairs: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_copied: int = 0


def work_of(output: SchedulerOutput) -> StepWork:
    """The work of a step that the scheduler planned."""
    num_tokens = num_samples = num_read = num_pairs = 0
    for part in output.scheduled:
        count = len(part.token_ids)
        num_tokens += count
        num_samples += len(part.samples) + part.num_drafts
        num_read += part.start + count
        num_pairs += count * part.start + count * (count + 1) // 2
    copies = output.block_copies
    return StepWork(
        1 if output.scheduled else 0,
        len(output.scheduled),
        num_tokens,
        num_samples,
        num_read,
        num_pairs,
        len(copies.swap_outs),
        len(copies.swap_ins),
        len(copies.copies),
    )
