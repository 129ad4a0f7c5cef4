"""A server of the wire contract that generates nothing: it plays back what a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from pageturner.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

Play = Callable[
    [generation_pb2.GenerateStreamRequest, grpc.ServicerContext],
    Iterator[generation_pb2.GenerateStreamResponse],
]

VOCAB_SIZE = 40
EOS_TOKEN_ID = 2
SPECIAL_TOKEN_IDS = frozenset({0, 1, EOS_TOKEN_ID})
MAX_MODEL_LEN = 512
POLICIES = {"queue": "fcfs", "victim": "least-computed"}


def delta(*token_ids: int) -> generation_pb2.GenerateStreamResponse:
    return generation_pb2.GenerateStreamResponse(delta=generation_pb2.Delta(token_ids=token_ids))


def finished(num_output_tokens: int, num_cached: int = 0) -> generation_pb2.GenerateStreamResponse:
    """A Finished with two swaps and a tail reclaim, a quarter of a second in the queue."""
    return generation_pb2.GenerateStreamResponse(
        finished=generation_pb2.Finished(
            usage=generation_pb2.Usage(output_tokens=num_output_tokens, cached_prompt_tokens=num_cached),
            timings=generation_pb2.Timings(
                queue_seconds=0.25, preemptions=generation_pb2.Preemptions(swaps=2, tail_reclaims=1)
            ),
            policies=POLICIES,
        )
    )


def play_in_full(
    request: generation_pb2.GenerateStreamRequest, context: grpc.ServicerContext
) -> Iterator[generation_pb2.GenerateStreamResponse]:
    """Accepted, one token a message up to max_tokens, Finished."""
    yield generation_pb2.GenerateStreamResponse(accepted=generation_pb2.Accepted(seed=1))
    for token_id in range(request.sampling.max_tokens):
        yield delta(token_id)
    yield finished(request.sampling.max_tokens)


@dataclass
class FakeServer:
    """Keeps every request it was sent, and the most that were open at once."""

    play: Play = play_in_full
    address: str = ""
    requests: list[generation_pb2.GenerateStreamRequest] = field(default_factory=list)
    num_loading_answers: int = 0
    """So many calls of GetModel are told first that the model is loading."""
    tokenize_requests: list[generation_pb2.TokenizeRequest] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stream(
        self, request: generation_pb2.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateStreamResponse]:
        with self.lock:
            self.requests.append(request)
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        is_open = True
        try:
            for message in self.play(request, context):
                if message.WhichOneof("event") == "finished":
                    is_open = self._close()  # before it goes: who has it may send the next at once
                yield message
        finally:
            if is_open:
                self._close()

    def _close(self) -> bool:
        with self.lock:
            self.num_open -= 1
        return False


@contextmanager
def serve(
    play: Play = play_in_full, *, address: str = "127.0.0.1:0", has_tokenizer: bool = True
) -> Iterator[FakeServer]:
    """The fake on `address`, by default a free port of this machine, in threads of its own."""
    fake = FakeServer(play)

    class Generation(generation_pb2_grpc.GenerationServiceServicer):
        def GenerateStream(  # type: ignore[no-untyped-def]  # noqa: N802  # gRPC's name
            self, request, context
        ):
            return fake.stream(request, context)

        def Tokenize(  # type: ignore[no-untyped-def]  # noqa: N802  # gRPC's name
            self, request, context
        ):
            fake.tokenize_requests.append(request)
            if not has_tokenizer:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "'fake' has no tokenizer; send token ids")
            num_ordinary = VOCAB_SIZE - len(SPECIAL_TOKEN_IDS)
            token_ids = [len(SPECIAL_TOKEN_IDS) + ord(c) % num_ordinary for c in request.prompt.text]
            return generation_pb2.TokenizeResponse(token_ids=token_ids)

    class Models(model_pb2_grpc.ModelServiceServicer):
        def GetModel(  # type: ignore[no-untyped-def]  # noqa: N802  # gRPC's name
            self, request, context
        ):
            if fake.num_loading_answers:
                fake.num_loading_answers -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
            if request.name not in ("", "fake"):
                context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name}")
            model = model_pb2.Model(
                name="fake",
                dtype="float32",
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=[EOS_TOKEN_ID],
            )
            return model_pb2.GetModelResponse(model=model)

    class Admin(admin_pb2_grpc.AdminServiceServicer):
        def GetServerInfo(  # type: ignore[no-untyped-def]  # noqa: N802  # gRPC's name
            self, request, context
        ):
            return admin_pb2.GetServerInfoResponse(version="1.2.3", kernels="none")

    server = grpc.server(ThreadPoolExecutor(max_workers=32))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Generation(), server)  # type: ignore[abstract]  # no test calls the rest
    model_pb2_grpc.add_ModelServiceServicer_to_server(Models(), server)  # type: ignore[abstract]  # no test calls the rest
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)  # type: ignore[abstract]  # no test calls the rest
    port = server.add_insecure_port(address)
    fake.address = address.replace(":0", f":{port}") if address.endswith(":0") else address
    server.start()
    try:
        yield fake
    finally:
        server.stop(grace=None).wait()
