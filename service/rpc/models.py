"""ModelService: what can be generated with."""

from __future__ import annotations

import grpc

from pageturner.service.engine.api import EngineClient, ModelInfo
from pageturner.service.errors import ModelNotFound
from pageturner.service.rpc import convert
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
        return pb.GetModelResponse(model=convert.from_model(find_model(self._lifecycle.engine, request.name)))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context[pb.ListModelsRequest, pb.ListModelsResponse]
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=map(convert.from_model, self._lifecycle.engine.models()))
