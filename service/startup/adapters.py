"""Adapters of a loaded model: from folders to where its steps find them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from pageturner.service.engine.adapter_options import AdapterOptions
from pageturner.service.engine.adapter_reports import AdapterFiles, NoAdapters
from pageturner.service.engine.adapters import Adapters
from pageturner.service.errors import AdapterError, ConfigError, InvalidArgument
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.adapters import AdapterWeights
from pageturner.service.model.decoder import Decoder
from pageturner.service.ranks.adapters import RankedAdapters
from pageturner.service.startup.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class _Read:
    """`ReadAdapter` of weights on the model's device."""

    weights: AdapterWeights
    store: AdapterStore

    @property
    def digest(self) -> str:
        return self.weights.digest

    @property
    def rank(self) -> int:
        return self.weights.rank

    @property
    def modules(self) -> tuple[str, ...]:
        return self.weights.modules

    @property
    def num_bytes(self) -> int:
        return self.weights.num_bytes

    def put(self) -> None:
        self.store.put(self.weights)


class DecoderAdapters:
    """`AdapterFiles` of the lean decoder. store: that its runner looks them up in."""

    refusal: str | None = None

    def __init__(self, decoder: Decoder, store: AdapterStore, options: AdapterOptions) -> None:
        self._decoder, self._store, self._options = decoder, store, options

    def read(self, folder: Path) -> _Read:
        options = self._options
        weights = self._decoder.read_adapter(folder, options.max_rank, int(options.memory))
        return _Read(weights, self._store)

    def drop(self, digest: str) -> None:
        self._store.drop(digest)


def build_adapters(model: LoadedModel, options: AdapterOptions, logger: FilteringBoundLogger) -> Adapters:
    """Those of the configuration are loaded. Raises ConfigError naming the one that is wrong."""
    files: AdapterFiles = NoAdapters(
        f"adapters are served by the lean decoder; {model.artifacts.name} runs on {model.model.backend}"
    )
    if isinstance(model.model, Decoder):
        files = DecoderAdapters(model.model, model.adapters, options)
        if model.ranks is not None:
            files = RankedAdapters(files, model.ranks.leader, options.max_rank, int(options.memory))
    adapters = Adapters(files, options, logger)
    for name, folder in options.load.items():
        try:
            adapters.preload(name, Path(folder))
        except (AdapterError, InvalidArgument) as error:
            raise ConfigError(f"adapters.load.{name}", str(error)) from error
    return adapters
