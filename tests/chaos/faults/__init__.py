"""What is done to the server, by name. A fault takes the site and a random source."""

from __future__ import annotations

from collections.abc import Mapping

from chaos.faults import calls, connections, features, frames, processes, readers, sizes
from chaos.faults.kind import Fault

FAULTS: Mapping[str, Fault] = {
    **calls.FAULTS,
    **readers.FAULTS,
    **sizes.FAULTS,
    **features.FAULTS,
    **connections.FAULTS,
    **frames.FAULTS,
    **processes.FAULTS,
}
