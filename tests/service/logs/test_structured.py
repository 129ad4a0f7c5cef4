"""Logs: JSON off a terminal, key=value on one, the request id on every line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from pageturner.service.logs.structured import Format, LogOptions, configure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_lines_carry_the_request_id() -> None:
    stream = io.StringIO()
    configure(LogOptions(), stream)
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        structlog.get_logger().info("accepted", num_prompt_tokens=3)
    line = json.loads(stream.getvalue())
    assert line["event"] == "accepted"
    assert line["request_id"] == "r-1"
    assert line["num_prompt_tokens"] == 3


def test_a_terminal_gets_key_and_value() -> None:
    stream = Terminal()
    configure(LogOptions(), stream)
    structlog.get_logger().info("accepted", request_id="r-1")
    assert "request_id" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(stream.getvalue())


def test_the_level_holds_back_less_severe_events() -> None:
    stream = io.StringIO()
    configure(LogOptions(level="warning"), stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().error("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_shows_no_values(form: Format) -> None:
    """The locals of whatever fails on a request hold its prompt."""
    stream = io.StringIO()
    configure(LogOptions(format=form), stream)
    prompt = "private " * 2
    nothing: dict[int, str] = {}
    try:
        nothing[len(prompt)]
    except KeyError:
        structlog.get_logger().exception("failed")
    assert "KeyError" in stream.getvalue()
    assert "private private" not in stream.getvalue()


def test_an_exception_is_one_json_line() -> None:
    stream = io.StringIO()
    configure(LogOptions(format="json"), stream)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "ValueError: broken" in json.loads(stream.getvalue())["exception"]


def test_what_libraries_log_has_the_form_of_the_log() -> None:
    program = (
        "import logging, warnings\n"
        "from pageturner.service.logs import structured as logs\n"
        "logs.detach_stderr(logs.LogOptions(format='json'))\n"
        "logs.configure(logs.LogOptions(format='json'))\n"
        "logging.getLogger('some.library').warning('said %d', 3)\n"
        "logging.getLogger('some.library').info('whispered')\n"
        "warnings.warn('old')\n"
    )
    finished = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    said, warned = map(json.loads, finished.stderr.splitlines())
    assert (said["event"], said["level"], said["logger"]) == ("library", "warning", "some.library")
    assert said["message"] == "said 3"
    assert "old" in warned["message"]


def test_a_librarys_own_level_and_bad_format_do_not_fail_its_caller() -> None:
    program = (
        "import logging\n"
        "from pageturner.service.logs import structured as logs\n"
        "logs.detach_stderr(logs.LogOptions(format='json'))\n"
        "logs.configure(logs.LogOptions(format='json'))\n"
        "logging.getLogger('some.library').log(35, 'notice')\n"
        "logging.getLogger('some.library').warning('said %d', 'three')\n"
    )
    finished = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    notice, said = map(json.loads, finished.stderr.splitlines())
    assert (notice["level"], notice["message"]) == ("warning", "notice")
    assert said["message"].startswith("said %d (not formatted: ")
    assert finished.returncode == 0
