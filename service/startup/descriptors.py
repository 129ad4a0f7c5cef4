"""Open files of the process: each connection is one, so their bound is a bound on connections."""

from __future__ import annotations

import resource
from collections.abc import Callable

from pageturner.service.errors import ConfigError

RESERVED = 256
"""Descriptors that connections leave to all else: listeners, the model's files, logs, gRPC's own."""
ENOUGH = 1 << 20
"""Descriptors that are asked for where the system has no bound."""

Limits = tuple[int, int]
"""The soft and the hard limit, as getrlimit(2) has them."""


def raise_descriptor_limit(
    read: Callable[[int], Limits] = resource.getrlimit,
    write: Callable[[int, Limits], None] = resource.setrlimit,
) -> Limits:
    """Raise the soft limit on open files to the hard one, as any program may that does not use select(2).

    Returns what it was before, and what is in force.
    """
    soft, hard = read(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY:
        return ENOUGH, ENOUGH
    if wanted <= soft:
        return soft, soft
    try:
        write(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a lower bound than it says
        return soft, soft
    return soft, wanted


def connection_limit(num_descriptors: int, configured: int | None) -> int:
    """Connections that may be open at once. Raises ConfigError for more than there are descriptors for."""
    most = max(1, num_descriptors - RESERVED)
    if configured is None:
        return most
    if configured > most:
        reason = f"{configured} is over {most}: the process may open {num_descriptors} files (ulimit -Hn)"
        raise ConfigError("server.max_connections", f"{reason}, and keeps {RESERVED} for itself")
    return configured
