"""A request on its tenant's account, once its prompt is read."""

from __future__ import annotations

from dataclasses import replace

from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduling.intake import checked_max_tokens
from pageturner.service.engine.api import ServerInfo
from pageturner.service.engine.tenants import Holding, TenantLedger
from pageturner.service.identity import Identity


def charged(
    tenants: TenantLedger,
    identity: Identity,
    holding: Holding,
    new: NewRequest,
    options: SchedulerOptions,
    server: ServerInfo,
) -> NewRequest:
    """The request, max_tokens stated where the tenant has limits of tokens.

    Raises InvalidArgument as the scheduler would, or TenantLimitReached.
    """
    limits, num_prompt = identity.limits, len(new.prompt_token_ids)
    if limits.max_tokens is None and limits.tokens_per_minute is None:
        tenants.charge(identity, holding, num_prompt, 0)
        return new
    fitting = checked_max_tokens(new, options, server.num_blocks, server.block_size)
    max_tokens = fitting if limits.max_tokens is None else min(fitting, limits.max_tokens)
    tenants.charge(identity, holding, num_prompt, new.params.n * max_tokens)
    return replace(new, params=replace(new.params, max_tokens=max_tokens))
