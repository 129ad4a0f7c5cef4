"""From a SchedulerOutput to token ids: weights, the paged forward, the sampler.

Owns the model's files as they are read and converted, its tensors and the KV cache's. `startup` builds it and
the engine thread drives it; it knows outputs and sampling parameters of the core, and nothing of requests or
text. Invariant: every weight that computes came from a file, and every id it is given has an embedding.
"""
