"""Processes that are killed or stopped, and a configuration that is wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from chaos.calling import GONE, LEFT, REFUSED
from chaos.faults.kind import Fault
from chaos.server import CONFIG
from chaos.site import Site
from pageturner.v1 import admin_pb2

TESTS = Path(__file__).parents[2]

WRONG_CONFIGS = (
    "[policies]\nvictim = 'nobody'\n",
    "[policies\n",
    "\x00\x01\x02",
    "[server]\nport = 'x'\n",
    "[no_such_section]\na = 1\n",
    "[policies]\nvictim = { name = 'last-arrived', nothing = 1 }\n",
)
VICTIMS = ("least-computed", "last-arrived", "fewest-outputs", "longest-remaining")
RECLAIMS = ("cost-model", "always-recompute", "always-swap", "tail-first")


@asynccontextmanager
async def _client(site: Site, prefix: str, count: int) -> AsyncIterator[Process]:
    """A client process whose streams all have their first message; SIGKILL on leaving."""
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "chaos.doomed_client", site.server.target, prefix, str(count)),
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path))},
    )
    assert client.stdout is not None
    try:
        if await client.stdout.readline() != b"open\n":
            site.ledger.problem("a client process ended before its streams were open")
        site.ledger.num_requests += count
        yield client
    finally:
        client.kill()
        await client.wait()


async def killed_clients(site: Site, random: Random) -> None:
    """SIGKILL to a client process in the middle of its streams."""
    prefix, count = site.ledger.new_id("killed"), random.randint(1, 6)
    site.tolerate(REFUSED)
    async with _client(site, prefix, count):
        pass


async def stopped_clients(site: Site, random: Random) -> None:
    """SIGSTOP to a client process: TCP goes on, nobody is there. The server must free what it held."""
    prefix = site.ledger.new_id("stopped")
    site.tolerate(REFUSED)
    async with _client(site, prefix, 3) as client:
        client.send_signal(signal.SIGSTOP)
        await site.until("the end of a stopped client's requests", lambda load: _ended(site, prefix))


def _ended(site: Site, prefix: str) -> bool:
    log = site.server.log
    assert log is not None, "the site's server has a log that is read"
    log.read()
    return not any(request_id.startswith(f"{prefix}-") for request_id in log.open_ids)


async def stopped_server(site: Site, random: Random, seconds: float = 3.0) -> None:
    """SIGSTOP to the server for longer than its keepalive allows, then SIGCONT."""
    site.tolerate(GONE, LEFT, REFUSED)
    site.expected_faults |= {"engine_stalled"}
    site.server.signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)  # how long it is gone is the fault itself
    site.server.signal(signal.SIGCONT)


async def long_stopped_server(site: Site, random: Random) -> None:
    """For 20 s."""
    await stopped_server(site, random, 20.0)


async def wrong_configuration(site: Site, random: Random) -> None:
    """A reload of a file with errors changes nothing, and is told; one of a good file is obeyed."""
    site.expected_faults |= {"reload_refused"}
    before = await site.admin.GetPolicies(admin_pb2.GetPoliciesRequest())
    site.server.config.write_text(random.choice(WRONG_CONFIGS))
    site.server.signal(signal.SIGHUP)
    await site.until_logged("reload_refused")
    after = await site.admin.GetPolicies(admin_pb2.GetPoliciesRequest())
    if _in_force(before.policies) != _in_force(after.policies):
        site.ledger.problem("a configuration with errors changed the policies")
    site.server.config.write_text(CONFIG)
    site.server.signal(signal.SIGHUP)
    await site.until_logged("reloaded")


async def policies_swapped(site: Site, random: Random) -> None:
    """Other policies a few times while requests run, some of them impossible; then those of the start."""
    for _ in range(6):
        change = admin_pb2.SetPoliciesRequest(
            policies={
                "victim": admin_pb2.PolicyChoice(name=random.choice((*VICTIMS, "nobody"))),
                "reclaim": admin_pb2.PolicyChoice(name=random.choice(RECLAIMS)),
            }
        )
        await asyncio.gather(site.admin.SetPolicies(change), return_exceptions=True)
    await site.admin.SetPolicies(admin_pb2.SetPoliciesRequest(preset="pageturner"))


def _in_force(policies: object) -> list[tuple[str, str]]:
    return [(policy.axis, policy.name) for policy in policies]  # type: ignore[attr-defined] # of the stubs


FAULTS: Mapping[str, Fault] = {
    "clients killed": killed_clients,
    "clients stopped": stopped_clients,
    "server stopped for 3 s": stopped_server,
    "wrong configurations": wrong_configuration,
    "policies swapped": policies_swapped,
}
LONG: Mapping[str, Fault] = {"server stopped for 20 s": long_stopped_server}
"""Not in the bounded run."""
