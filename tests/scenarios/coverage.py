"""Which tests hold which report: reference -> node ids, from the root of the repository.

Tests in this folder and elsewhere carry the reference in their names; the few that stand under a name of
their own, because they hold a whole kind, are named here beside one that does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
REFERENCES = FOLDER / "references.txt"

KINDS: dict[str, tuple[str, ...]] = {
    "victim-lost": (
        "tests/scenarios/test_priority.py::test_no_request_is_preempted_for_a_candidate_that_cannot_be_served",
        "tests/scenarios/test_priority.py::test_victims_finish_though_their_claimant_is_aborted_or_ends",
    ),
    "over-long-requests": (
        "tests/scenarios/test_never_schedulable.py::test_over_long_requests_are_always_answered",
        "tests/scenarios/test_never_schedulable.py::test_over_long_requests_are_always_answered_on_the_wire",
    ),
    "fork-at-a-full-block": (
        "tests/scenarios/test_references.py::test_a_fork_at_a_full_block_copies_nothing",
    ),
    "partial-block-reuse": (
        "tests/scenarios/test_references.py::test_each_request_computes_its_own_partial_block",
        "tests/service/core/test_partial_blocks.py::test_a_prompt_that_parts_within_the_block_finds_nothing_of_it",
        "tests/service/core/test_partial_blocks.py::test_while_its_holder_is_paused_another_copies_it",
    ),
    "vllm-ascend#16013": ("tests/service/model/test_kv_cache.py::test_copies_are_simultaneous",),
    "vllm#14326": (
        "tests/service/core/test_guards.py::test_aborting_a_request_aborts_all_its_choices",
        "tests/service/rpc/test_cancel.py::test_one_abort_by_id_ends_a_call_with_all_its_choices",
    ),
    "exo#1691": ("tests/service/engine/test_incremental_decoder.py::test_no_half_character_is_shown",),
    "text-generation-inference#1254": (
        "tests/service/engine/test_stop_strings.py::test_shown_text_never_holds_a_stop",
    ),
    "smg#2203": (
        "tests/service/engine/test_stop_strings.py::test_withheld_is_the_longest_end_that_may_become_a_stop",
    ),
    "tensorrt-llm#13318": ("tests/service/engine/test_engine.py::test_a_failed_step_fails_no_other_request",),
    "nano-vllm#277": ("tests/service/engine/test_engine.py::test_a_standstill_gives_up_the_oldest",),
    "sglang#36475": ("tests/service/rpc/test_cancel.py::test_leaving_a_stream_at_any_message_aborts_it",),
}


def references() -> tuple[str, ...]:
    """Every reference of references.txt, in its order."""
    lines = REFERENCES.read_text().splitlines()
    return tuple(line.split()[0] for line in lines if line and not line.startswith("#"))


def all_tests() -> Iterator[tuple[str, str]]:
    """Path and name of every test function of the repository."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE):
            yield path.relative_to(ROOT).as_posix(), name


def carries(name: str, reference: str) -> bool:
    """Whether a test is named after the reference: `vllm_39734_35541` names vllm#39734 and vllm#35541."""
    repository, _, number = reference.partition("#")
    slug = re.sub(r"\W", "_", repository)
    return re.search(rf"(?:^test|_){slug}(?:_\d+)*_{number}(?:_|$)", name) is not None


def coverage() -> dict[str, tuple[str, ...]]:
    """Each reference's tests; empty where there is none."""
    functions = list(all_tests())
    known = {f"{path}::{name}" for path, name in functions}
    table = {}
    for reference in references():
        named = [
            f"{path}::{name}" for path, name in functions if "#" in reference and carries(name, reference)
        ]
        kinds = [node for node in KINDS.get(reference, ()) if node in known]
        table[reference] = tuple(dict.fromkeys(named + kinds))
    return table
