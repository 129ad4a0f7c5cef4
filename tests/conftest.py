"""What holds for every test: bytecode is kept, what marks stand for, how long a search at length may be, and
whether a file may leave something behind."""

from __future__ import annotations

import os
import random
import sys
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from support.at_length import AtLength
from support.leftovers import LeftoversGuard

_EXAMPLES = "examples"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make soak` bounds, and a look at each file that costs time."""
    parser.addoption(
        "--minutes-each", type=float, default=10.0, help="of a state machine at length (default: 10)"
    )
    parser.addoption(
        "--leftovers",
        action="store_true",
        help="a file has an error if it leaves processes, threads or shared memory behind",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Write bytecode, whatever the environment says: a hundred tests start a Python of their own, and each
    would compile torch's modules anew, for half of its processor time."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # How long an example takes says what else the machine does.
    settings.register_profile("pageturner", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("pageturner")
    if config.getoption("--leftovers"):
        config.pluginmanager.register(LeftoversGuard())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A machine without a GPU is the one reason not to run a `gpu` test: where there is one, kernels that
    cannot be had fail it."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")


@pytest.fixture
def at_length(request: pytest.FixtureRequest) -> AtLength:
    """A search of so many examples, or of --minutes-each; --hypothesis-seed repeats one."""
    chosen = request.config.getoption("--hypothesis-seed")
    first_seed = random.SystemRandom().randrange(1 << 32) if chosen is None else int(chosen)
    tell = partial(_tell, request.node)
    return AtLength(60 * request.config.getoption("--minutes-each"), first_seed, tell)


def _tell(item: pytest.Item, text: str) -> None:
    item.user_properties.append((_EXAMPLES, text))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How far each search came."""
    for reports in (terminalreporter.getreports("passed"), terminalreporter.getreports("failed")):
        for report in reports:
            for name, text in report.user_properties:
                if name == _EXAMPLES and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {text}")
