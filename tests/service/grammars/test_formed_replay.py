"""A flight record of answers of a form replays, and says nothing of what they say."""

from __future__ import annotations

from random import Random

import pytest
from support.flight import record_of, recorded
from support.formed_machine import ParsingHarness
from support.formed_model import END, FormedModel

from pageturner.policies import registry
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.flight import flight_file
from pageturner.service.flight.replay import replay

FORMS = (
    StructuredOutput(OutputForm.JSON_SCHEMA, '{"items": {"type": "boolean"}, "type": "array"}'),
    StructuredOutput(OutputForm.REGEX, "(ab)*c?"),
    StructuredOutput.one_of(("a", "abc")),
    None,
)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("seed", "num_steps"), [(0, 1 << 16), (1, 1 << 16), (2, 1 << 16), (0, 9), (1, 30)])
def test_every_decision_of_a_run_with_forms_comes_out_again(seed: int, num_steps: int, depth: int) -> None:
    """Ends below min_tokens included, which only an answer of a form has; searches with more beams than the
    form has texts; from the beginning, and from wherever a record that forgot it begins."""
    harness = ParsingHarness(
        registry.create_set({"admission": "first-chunk"}),
        num_blocks=12,
        block_size=2,
        num_host_blocks=6,
        depth=depth,
        options=SchedulerOptions(max_model_len=40, max_num_seqs=4, max_num_batched_tokens=8),
    )
    recorded(harness, num_steps)
    random = Random(seed)
    for number in range(10):
        form = random.choice(FORMS)
        harness.submit(
            tuple(random.randrange(3) for _ in range(random.randint(1, 5))),
            max_tokens=8,
            min_tokens=random.choice((0, 0, 8)),
            stop_ids=() if form is None else (END,),
            n=random.choice((1, 2)),
            seed=number,
            known=random.choice((None, (1,), (0, 2))),
            form=form,
        )
        if form is not None:
            stopping = random.choice(tuple(EarlyStopping))
            harness.submit(
                (number % 3, 1),
                max_tokens=random.choice((5, 7)),
                min_tokens=random.choice((0, 5)),
                stop_ids=(END,),
                n=random.choice((1, 3)),
                form=form,
                beam_search=BeamSearch(3, 1.0, stopping),
            )
        for _ in range(random.randint(0, 3)):
            harness.step()
        if number == 5:
            harness.fail()
    harness.run_to_end()
    harness.check_finished()
    record = record_of(harness)
    result = replay(flight_file.load(flight_file.dump(record)))
    assert result.difference is None
    text = "\n".join(flight_file.lines(record))
    assert "boolean" not in text
    assert "(ab)" not in text
    model = harness.model
    assert isinstance(model, FormedModel)
    model.masks.close()
