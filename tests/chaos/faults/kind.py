"""What a fault is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

from chaos.site import Site

Fault = Callable[[Site, Random], Awaitable[None]]
"""Does it once. What must hold afterwards is checked by `Site.settle`; what must hold meanwhile goes to the
site's ledger as a problem."""
