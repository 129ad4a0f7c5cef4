"""ModelService: what can be generated with."""

from __future__ import annotations

from dataclasses import replace

import grpc

from pageturner.service.engine.api import EngineClient, ModelInfo
from pageturner.service.errors import ModelNotFound
from pageturner.service.rpc import convert
from pageturner.service.rpc.callers import current_caller
from pageturner.service.rpc.lifecycle import Lifecycle
from pageturner.v1 import model_pb2 as pb
from pageturner.v1.model_pb2_grpc import ModelServiceServicer

Context = grpc.aio.ServicerContext


def find_model(engine: EngineClient, name: str) -> ModelInfo:
    """The model of that name, the default one for ""; raises ModelNotFound."""
    models = engine.models()
    for model in models:
        if name in ("", model.name):
            return model
    raise ModelNotFound(name, ", ".join(model.name for model in models))


class ModelServicer(ModelServiceServicer):
    """Raises PageturnerError; the interceptor makes statuses of them."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def GetModel(
        self, request: pb.GetModelRequest, context: Context[pb.GetModelRequest, pb.GetModelResponse]
    ) -> pb.GetModelResponse:
        model = find_model(self._lifecycle.engine, request.name)
        return pb.GetModelResponse(model=convert.from_model(_as_seen(model)))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context[pb.ListModelsRequest, pb.ListModelsResponse]
    ) -> pb.ListModelsResponse:
        models = map(_as_seen, self._lifecycle.engine.models())
        return pb.ListModelsResponse(models=map(convert.from_model, models))


def _as_seen(model: ModelInfo) -> ModelInfo:
    """With the adapters that the caller may use: names of others are none of its business."""
    allowed = current_caller().limits.adapters
    if allowed is None:
        return model
    return replace(model, adapters=tuple(name for name in model.adapters if name in allowed))
