"""OpenVINO GenAI's continuous batching pipeline, behind a small server that runs in its own Python."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.peers.completions import completion, completions, count_token_ids
from pageturner.loadtest.peers.peer import Command, Send

_SERVER = Path(__file__).with_name("openvino_server.py")


@dataclass(frozen=True, slots=True)
class OpenVino:
    """python: of an environment with openvino-genai. model: a GGUF file, or a folder that it exported."""

    python: Path
    model: Path
    name: str = "OpenVINO"

    def command(self, port: int, demand: Demand) -> Command:
        # -I: this folder, whose modules have the names of peers, is none of its path.
        program = (str(self.python), "-I", str(_SERVER))
        return Command((*program, str(self.model), str(port), str(demand.num_sequences)))

    def connected(self, address: str) -> AbstractAsyncContextManager[Send]:
        return completions(address, completion, count_token_ids)
