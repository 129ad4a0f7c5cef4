"""An application on a Ray of its own, in a child process: told by lines of JSON, ended with all it started.

    python -m support.ray_application FOLDER

Ray writes to FOLDER and nowhere else. The first line that it prints is the port. Each line of standard input
is the arguments of an application to deploy, in place of the one before; the answer is a line, "deployed" or
the error. The end of the input is the end of it all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped] # it has no types

NAME = "pageturner"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a token would be written to the user's home
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_worker_niceness": "0",  # by default 15: beside other tests they would get next to nothing
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class RayApplication:
    """target: of Ray's gRPC proxy."""

    process: subprocess.Popen[str]
    target: str

    def deploy(self, arguments: Mapping[str, Any]) -> None:
        """Bring an application into force; returns once it serves. Raises AssertionError with what went
        wrong."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process of the application has ended"
        assert json.loads(answer) == "deployed", answer

    def replicas(self, deployment: str = "Engine") -> list[int]:
        """The processes of a deployment's replicas, those that start included."""
        mark = f"ray::ServeReplica:{NAME}:{deployment}"
        return [each.pid for each in _descendants(self.process.pid) if _command(each).startswith(mark)]

    def kill_replica(self, deployment: str = "Engine") -> None:
        """End a process as a fault does, without a word."""
        os.kill(min(self.replicas(deployment)), signal.SIGKILL)


@contextmanager
def ray_application(folder: Path, arguments: Mapping[str, Any]) -> Iterator[RayApplication]:
    """folder: short, since Ray keeps sockets below it."""
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.ray_application", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, _paths()))},
        )
    started: set[psutil.Process] = set()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "stderr").read_text()
        application = RayApplication(process, f"127.0.0.1:{json.loads(line)}")
        application.deploy(arguments)
        yield application
    finally:
        started.update(_descendants(process.pid))
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        for each in started:  # what Ray itself ended is gone, what it left is not
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue


def _paths() -> list[str]:
    return [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(folder: Path) -> None:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    from pageturner.service.scale import app

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints on standard output
    ray.init(
        num_cpus=6,  # so many workers start at once; three replicas and a new version want them
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _temp_dir=str(folder),
    )
    port = _free_port()
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=_free_port()),
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=list(app.SERVICERS)),
    )
    answers.write(json.dumps(port) + "\n")
    for line in sys.stdin:
        try:
            serve.run(app.build(json.loads(line)), name=NAME)
        except Exception as error:
            answers.write(json.dumps(f"{type(error).__name__}: {error}") + "\n")
        else:
            answers.write(json.dumps("deployed") + "\n")
    ray.shutdown()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' own Ctrl-C ends the input
    _serve(Path(sys.argv[1]))
