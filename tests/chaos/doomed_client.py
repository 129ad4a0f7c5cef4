"""A client that is there to be killed: opens streams and says so, then reads slowly until it is.

python -m chaos.doomed_client TARGET PREFIX COUNT
"""

from __future__ import annotations

import sys
import threading

import grpc

from chaos.calling import request
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub


def main(target: str, prefix: str, count: str) -> None:
    """Prints a line once each stream has its first message."""
    channel = grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),))
    stub = GenerationServiceStub(channel)

    def read(number: int, is_open: threading.Barrier) -> None:
        asked = request(f"{prefix}-{number}", (1, 2, 3), max_tokens=2000)
        for position, _ in enumerate(stub.GenerateStream(asked)):
            if position == 0:
                is_open.wait()

    is_open = threading.Barrier(int(count) + 1)
    for number in range(int(count)):
        threading.Thread(target=read, args=(number, is_open), daemon=True).start()
    is_open.wait()
    print("open", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
