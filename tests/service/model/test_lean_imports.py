"""The lean start does not pay for what it does not use."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
import pageturner.service.model.build
import pageturner.service.model.loader
import pageturner.service.model.runner
import pageturner.service.model.sampler
dear = {"transformers", "gguf", "huggingface_hub", "llm"}
print(*sorted(dear & {name.partition(".")[0] for name in sys.modules}))
"""


def test_transformers_is_imported_only_for_models_that_need_it() -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True)
    assert found.stdout.split() == []
