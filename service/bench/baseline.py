"""`transformers`' own generate() as a process to race against: one warm batch, again and again.

    python -P -m pageturner.service.bench.baseline MODEL --cache-dir ... --batch 16 --prompt-tokens 128 ...

loads the model once and warms it up, prints "ready", then answers each line on standard input with the
seconds that one batch took. In a process of its own, so that neither contender's allocator, threads or
caches are the other's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path


def load_batch(arguments: argparse.Namespace) -> Callable[[], float]:
    """A function that generates for one batch and returns its seconds."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from pageturner.service.model.cpu_features import fit_dtype, read_cpuinfo
    from pageturner.service.model.loader import load_artifacts
    from pageturner.service.model.options import ModelOptions

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    # Where bfloat16 is emulated, beating it would prove nothing.
    options, _ = fit_dtype(
        ModelOptions(arguments.model, dtype=arguments.dtype), torch.device("cpu"), read_cpuinfo()
    )
    artifacts = load_artifacts(options, arguments.cache_dir)
    model = AutoModelForCausalLM.from_pretrained(artifacts.folder, dtype=getattr(torch, artifacts.dtype))
    model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    generator = torch.Generator().manual_seed(arguments.seed)
    shape = (arguments.batch, arguments.prompt_tokens)
    # Ids from the middle of the vocabulary: special tokens lie at its ends.
    vocab_size = model.config.vocab_size
    prompts = torch.randint(vocab_size // 8, vocab_size // 2, shape, generator=generator)

    def generate() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=arguments.output_tokens,
                max_new_tokens=arguments.output_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        assert output.shape[1] == arguments.prompt_tokens + arguments.output_tokens
        return seconds

    return generate


def main() -> None:
    """Load the model, then time a batch for each line of standard input, until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    generate = load_batch(parser.parse_args())
    generate()
    print("ready", flush=True)  # noqa: T201  # the protocol with the parent
    for _ in sys.stdin:
        print(generate(), flush=True)  # noqa: T201  # the protocol with the parent


if __name__ == "__main__":
    main()
