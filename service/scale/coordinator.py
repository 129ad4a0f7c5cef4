"""The deployment that owns what all replicas agree on. There is one, which every replica asks when it starts.

Nothing that a client waits for passes through it but changes of policies. One that is started anew finds the
agreement again at the replicas; so it is lost only with all of them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from pageturner.service.errors import StaleRevision
from pageturner.service.scale.agreement import Agreement
from pageturner.service.scale.calls import Call, Failure
from pageturner.v1 import admin_pb2 as pb

KEY_BYTES = 32
LOOKS, LOOK_SECONDS = 3, 0.5
"""How often replicas are looked for by a coordinator that has just started, and the time between."""


class Engines(Protocol):
    """As much of `RayReplicas` as is asked here."""

    async def one(self, method_name: str, *arguments: object) -> Any: ...

    async def all(self, method_name: str, *arguments: object) -> list[Any]: ...


class Coordinator:
    """engines: finds the replicas, once it is asked. new_key: draws a secret for the prefix caches."""

    def __init__(
        self,
        engines: Callable[[], Engines],
        new_key: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._engines = engines
        self._new_key = new_key
        self._agreement: Agreement | None = None
        self._lock = asyncio.Lock()
        self._logger = structlog.get_logger()

    async def join(self) -> Agreement:
        """The agreement in force."""
        async with self._lock:
            return await self._current()

    async def set_policies(self, request: bytes, call: Call) -> bytes | Failure:
        """Change the policies of all replicas, those that start later included; a SetPoliciesResponse.

        One replica tries the change first. What it refuses is in force nowhere.
        """
        message = pb.SetPoliciesRequest.FromString(request)
        async with self._lock:
            agreement = await self._current()
            try:
                agreement.check(message)
            except StaleRevision as error:
                return Failure.of(error)
            message.ClearField("expected_revision")
            change, changed = message.SerializeToString(), agreement.changed(message)
            answer: bytes | Failure = await self._engines().one("agree", changed, change, call)
            if isinstance(answer, Failure) or changed is agreement:
                return answer
            self._agreement = changed
            answers = await self._engines().all("agree", changed, change, call)
        failed = [each for each in answers if not isinstance(each, bytes)]
        self._logger.info(
            "policies_agreed", revision=changed.revision, replicas=len(answers), failed=len(failed)
        )
        # A replica that died meanwhile is replaced by one that joins; one that could not be reached asks.
        return next((each for each in failed if isinstance(each, Failure)), answer)

    async def _current(self) -> Agreement:
        if self._agreement is None:
            self._agreement = await self._found() or Agreement(self._new_key(KEY_BYTES))
        return self._agreement

    async def _found(self) -> Agreement | None:
        """The newest that a replica has; None where there are no replicas."""
        engines = self._engines()
        for look in range(LOOKS):
            if look:
                await asyncio.sleep(LOOK_SECONDS)
            found = [each for each in await engines.all("agreement") if isinstance(each, Agreement)]
            if found:
                return max(found, key=lambda agreement: agreement.revision)
        return None
