"""What watches the server leaves it as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from support.real_service import real_service

from chaos.ledger import Ledger
from chaos.site import Site


async def test_a_watch_of_the_load_ends_when_what_it_waits_for_has_come() -> None:
    """Dozens that go on, each telling the load ten times a second, leave a server no time for a flood."""
    async with real_service() as service:
        nobody = cast(Any, None)
        site = Site(Path(), Path(), nobody, service.channel, Ledger())
        for _ in range(3):
            await site.until("a load", lambda load: True)
        await service.until(lambda: service.num_handled("CANCELLED") == 3)
    assert not site.ledger.problems
