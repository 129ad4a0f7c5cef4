"""GenerationService: a call becomes a request of the engine, the engine's events become messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from pageturner.service.engine.api import MAX_NAME_CHARACTERS, GenerationRequest
from pageturner.service.errors import InvalidArgument
from pageturner.service.rpc import convert, from_wire
from pageturner.service.rpc.callers import current_caller
from pageturner.service.rpc.events import opened
from pageturner.service.rpc.lifecycle import Lifecycle
from pageturner.service.rpc.models import find_model
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.stream_messages import StreamMessages
from pageturner.service.rpc.tracing import current_trace_parent
from pageturner.service.rpc.whole_answer import gathered
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceServicer

Context = grpc.aio.ServicerContext


class GenerationServicer(GenerationServiceServicer):
    """Raises PageturnerError; the interceptor makes statuses of them.

    new_request_id: names requests whose client did not.
    """

    def __init__(
        self,
        options: ServerOptions,
        lifecycle: Lifecycle,
        logger: structlog.typing.FilteringBoundLogger,
        new_request_id: Callable[[], str],
    ) -> None:
        self._options = options
        self._lifecycle = lifecycle
        self._logger = logger
        self._new_request_id = new_request_id

    async def GenerateStream(
        self,
        request: pb.GenerateStreamRequest,
        context: Context[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        generation = self._generation(request, context.time_remaining())
        messages = StreamMessages(generation.request_id)
        async with opened(self._lifecycle.engine, generation) as stream:
            async for event in stream:
                yield messages.message(event)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context[pb.GenerateRequest, pb.GenerateResponse]
    ) -> pb.GenerateResponse:
        for received in request.resume.choices:
            received.finished = False  # the one answer tells how each choice ended
        generation = self._generation(request, context.time_remaining())
        async with opened(self._lifecycle.engine, generation) as stream:
            return await gathered(aiter(stream), generation.request_id, generation.params.n)

    async def Score(
        self, request: pb.ScoreRequest, context: Context[pb.ScoreRequest, pb.ScoreResponse]
    ) -> pb.ScoreResponse:
        engine = self._lifecycle.engine
        request_id = self._named(request.request_id)
        wanted = from_wire.to_score_request(
            request,
            request_id,
            context.time_remaining(),
            engine.limits.generation,
            current_caller(),
            current_trace_parent(),
        )
        if self._options.log_prompts:
            self._logger.info(
                "prompt", request_id=request_id, prompt=wanted.prompt, continuations=wanted.continuations
            )
        try:
            return convert.from_scores(await engine.score(wanted))
        except InvalidArgument as error:
            raise from_wire.to_score_path(error, wanted.prompt) from error

    async def Abort(
        self, request: pb.AbortRequest, context: Context[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        if not 1 <= len(request.request_ids) <= self._options.max_abort_ids:
            bounds = f"[1, {self._options.max_abort_ids}]"
            raise InvalidArgument("request_ids", f"{len(request.request_ids)} ids, not in {bounds}")
        response = pb.AbortResponse()
        for request_id in request.request_ids:
            outcome = await self._lifecycle.engine.abort(request_id, tenant=current_caller().tenant)
            response.results.add(request_id=request_id, outcome=convert.ABORT_OUTCOMES[outcome])
        return response

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: Context[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        engine = self._lifecycle.engine
        find_model(engine, request.model)
        add_special_tokens = request.add_special_tokens or not request.HasField("add_special_tokens")
        prompt = from_wire.to_prompt(request.prompt, engine.limits.tokenization)
        try:
            caller = current_caller()
            token_ids = await engine.tokenize(prompt, add_special_tokens=add_special_tokens, identity=caller)
            rendered = await engine.render(prompt, identity=caller) if request.return_prompt else ""
        except InvalidArgument as error:
            raise from_wire.to_wire_path(error, prompt) from error
        return pb.TokenizeResponse(token_ids=token_ids, rendered_prompt=rendered)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context[pb.DetokenizeRequest, pb.DetokenizeResponse]
    ) -> pb.DetokenizeResponse:
        engine = self._lifecycle.engine
        find_model(engine, request.model)
        engine.limits.tokenization.check_tokens(len(request.token_ids), "token_ids")
        text = await engine.detokenize(tuple(request.token_ids), identity=current_caller())
        return pb.DetokenizeResponse(text=text)

    def _generation(
        self, request: pb.GenerateRequest | pb.GenerateStreamRequest, deadline_seconds: float | None
    ) -> GenerationRequest:
        limits = self._lifecycle.engine.limits.generation
        request_id = self._named(request.request_id)
        generation = from_wire.to_generation_request(
            request, request_id, deadline_seconds, limits, current_caller(), current_trace_parent()
        )
        if generation.tenant:
            structlog.contextvars.bind_contextvars(tenant=generation.tenant[:MAX_NAME_CHARACTERS])
        if self._options.log_prompts:
            self._logger.info("prompt", request_id=request_id, prompt=generation.prompt)
        return generation

    def _named(self, request_id: str) -> str:
        """The id that the client gave, or one that is drawn; from now on log lines of the call have it."""
        request_id = request_id or self._new_request_id()
        structlog.contextvars.bind_contextvars(request_id=request_id[:MAX_NAME_CHARACTERS])
        return request_id
