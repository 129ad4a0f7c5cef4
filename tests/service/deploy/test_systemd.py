"""The unit: verified by systemd itself where it is there, hardened, and told when the service is ready."""

from __future__ import annotations

import configparser
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from support.deployment import DEPLOY, configuration

from pageturner.service.config import notify_socket
from pageturner.service.startup.readiness import READY, Readiness

UNIT = DEPLOY / "systemd" / "pageturner.service"
MOST_EXPOSED = 2.0
"""Of 10, as `systemd-analyze security` counts."""


class _Unit(configparser.RawConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def unit() -> configparser.RawConfigParser:
    parser = _Unit(strict=False)  # SystemCallFilter is given twice
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def _analyze(*words: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run([tool, *words], capture_output=True, text=True)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/pageturner/bin/pageturner", "/bin/true"))
    found = _analyze("verify", str(copy))
    if "unrecognized" in found.stderr.lower():
        pytest.skip(f"this systemd cannot verify files: {found.stderr}")
    assert (found.stdout + found.stderr, found.returncode) == ("", 0)


def test_the_unit_has_few_rights() -> None:
    found = _analyze("security", "--offline=true", str(UNIT))
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", found.stdout)
    if exposure is None:
        pytest.skip(f"this systemd cannot judge files: {found.stderr}")
    assert float(exposure[1]) <= MOST_EXPOSED


def test_a_stop_waits_for_the_drain_and_a_reload_reaches_the_service(
    unit: configparser.RawConfigParser, tmp_path: Path
) -> None:
    loaded = configuration(UNIT.with_name("pageturner.toml"), tmp_path)
    service, server = unit["Service"], loaded.config.server
    assert float(service["TimeoutStopSec"]) > server.drain_seconds + server.abort_seconds
    assert service["KillSignal"] == "SIGTERM"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["Type"] == "notify"
    assert server.admin_host is not None
    assert server.admin_host.startswith(f"unix:/run/{service['RuntimeDirectory']}/")


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_hears_that_the_service_is_ready(is_abstract: bool, tmp_path: Path) -> None:
    name = f"@pageturner-test-{tmp_path.name}-{id(tmp_path)}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hears:
        hears.bind(f"\0{name[1:]}" if is_abstract else name)
        assert Readiness(notify_socket({"NOTIFY_SOCKET": name})).tell(READY)
        assert hears.recv(100) == b"READY=1"


def test_nobody_who_hears_is_nothing_to_fail_for(tmp_path: Path) -> None:
    assert not Readiness(notify_socket({})).tell(READY)
    assert not Readiness(str(tmp_path / "nobody")).tell(READY)
