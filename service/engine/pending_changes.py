"""Changes of policies, on their way to the engine thread and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from pageturner.service.engine.api import PolicyChange
from pageturner.service.engine.health import Health
from pageturner.service.engine.policy_creation import create_policies, summarise
from pageturner.service.engine.thread_messages import (
    ChangePolicies,
    Command,
    PoliciesAnswer,
    PoliciesChanged,
    PolicyChangeRefused,
)
from pageturner.service.errors import EngineDead, PageturnerError
from pageturner.service.policy_host.reports import PoliciesInfo

MAX_REASON_CHARACTERS = 1000


class PendingChanges:
    """Those that wait for the engine thread's answer. Lives on the event loop. send: leaves it a command."""

    def __init__(self, health: Health, logger: FilteringBoundLogger, send: Callable[[Command], None]) -> None:
        self._health = health
        self._logger = logger
        self._send = send
        self._answers: dict[int, asyncio.Future[PoliciesAnswer]] = {}
        self._next_id = 0

    async def carry_out(self, change: PolicyChange) -> PoliciesInfo:
        """What is in force once it is done; who asked for it, and what came of it, is logged.

        Raises as `api.EngineClient.set_policies`.
        """
        try:
            done = await self._ask_thread(change)
        except PageturnerError as error:
            reason = str(error)[:MAX_REASON_CHARACTERS]  # it may quote what was sent
            self._logger.warning("policies_refused", origin=change.origin, reason=reason)
            raise
        old, new = summarise(done.old), summarise(done.new)
        changed = [axis for axis in new if new[axis] != old[axis]]
        self._logger.info(
            "policies_set",
            origin=change.origin,
            revision=done.new.revision,
            old={axis: old[axis] for axis in changed},
            new={axis: new[axis] for axis in changed},
        )
        return done.new

    def deliver(self, answer: PoliciesAnswer) -> None:
        waiting = self._answers.get(answer.change_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail_all(self, reason: str) -> None:
        """The engine is dead, and will answer none of them."""
        for change_id in self._answers:
            self.deliver(PolicyChangeRefused(change_id, EngineDead(reason)))

    async def _ask_thread(self, change: PolicyChange) -> PoliciesChanged:
        self._health.refuse_unless_serving()
        policies, shadows = await asyncio.to_thread(create_policies, change)
        # Importing a policy may have taken a while.
        self._health.refuse_unless_serving()
        answer: asyncio.Future[PoliciesAnswer] = asyncio.get_running_loop().create_future()
        change_id, self._next_id = self._next_id, self._next_id + 1
        self._answers[change_id] = answer
        try:
            self._send(ChangePolicies(change_id, policies, shadows, change.expected_revision))
            done = await answer
        finally:
            del self._answers[change_id]
        if isinstance(done, PolicyChangeRefused):
            raise done.error
        return done
