"""From a SchedulerOutput to token ids: weights, the paged forward, the sampler."""
