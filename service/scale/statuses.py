"""How a call ends over Ray's gRPC proxy, so that its client is told what a server of ours would tell.

The proxy takes over code, details and trailing metadata of the context that comes with a *result*; of an
exception it keeps code and details alone. So nothing is raised: a failed unary call returns an empty
message, which gRPC drops beside a code that is not OK, and a failed stream yields one last empty message,
which carries the context and reaches the client as a message without an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.rpc.status_pb2 import Status

from pageturner.service.scale.calls import Failure

_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class RpcContext(Protocol):
    """As much of Ray's RayServegRPCContext as is used. It is a copy: the call goes on when it is changed."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...

    def peer(self) -> str: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, str | bytes]]) -> None: ...


@dataclass(frozen=True, slots=True)
class Serialized:
    """A message as its bytes, for the proxy, which asks for no more of it: Ray reads a streamed message only
    after the next one was made."""

    content: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that messages of protobuf have
        return self.content


def end_with(context: RpcContext, failure: Failure) -> None:
    """Let the call end so, with the message that is given to the proxy next."""
    status = Status.FromString(failure.status)
    context.set_code(_CODES[status.code])
    context.set_details(status.message)
    context.set_trailing_metadata([(_DETAILS_KEY, failure.status)])
