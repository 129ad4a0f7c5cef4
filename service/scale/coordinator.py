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
from pageturner.service.scale.calls import Call, Failure, ReplicaLost
from pageturner.v1 import admin_pb2 as pb

KEY_BYTES = 32
MAX_TRIES = 3
"""Replicas that a change is shown to before it is given up, where those before died of or with it."""

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
        self._changing, self._finding = asyncio.Lock(), asyncio.Lock()
        self._logger = structlog.get_logger()

    async def join(self, own: Agreement | None = None) -> Agreement:
        """The agreement in force. own: what the replica that asks has carried out; where that is a change of
        which nobody heard how it ended, as its first replica hung or this process died, it is in force for
        all.

        Waits for no change that is under way: that waits for a replica, and a replica that starts waits for
        this.
        """
        if self._agreement is None:
            async with self._finding:
                if self._agreement is None:
                    self._agreement = await self._found() or Agreement(self._new_key(KEY_BYTES))
        if own is not None and not self._changing.locked():
            self._agreement = self._agreement.with_change_of(own)
        return self._agreement

    async def set_policies(self, request: bytes, call: Call) -> bytes | Failure:
        """Change the policies of all replicas, those that start later included; a SetPoliciesResponse.

        One replica tries the change first. What it refuses is in force nowhere.
        """
        message = pb.SetPoliciesRequest.FromString(request)
        async with self._changing:
            agreement = await self.join()
            try:
                agreement.check(message)
            except StaleRevision as error:
                return Failure.of(error)
            message.ClearField("expected_revision")
            change, changed = message.SerializeToString(), agreement.changed(message)
            answer = await self._tried(changed, change, call)
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

    async def _tried(self, changed: Agreement, change: bytes, call: Call) -> bytes | Failure:
        """What the first replica says that lives to say it. Raises ReplicaLost, NoReplica."""
        for _ in range(MAX_TRIES - 1):
            try:
                return await self._agreed_by_one(changed, change, call)
            except ReplicaLost as error:
                self._logger.warning("policies_not_tried", revision=changed.revision, reason=str(error))
        return await self._agreed_by_one(changed, change, call)

    async def _agreed_by_one(self, changed: Agreement, change: bytes, call: Call) -> bytes | Failure:
        answer: bytes | Failure = await self._engines().one("agree", changed, change, call)
        return answer

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
