"""The compose file: every file that it mounts is there, and its server has as few rights as it needs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.deployment import DEPLOY, documents

from pageturner.service.config import load_config

COMPOSE = DEPLOY / "compose"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    (document,) = documents(COMPOSE / "compose.yaml")
    found: dict[str, Any] = document["services"]
    return found


def test_each_file_that_is_mounted_or_built_from_is_there(services: dict[str, Any]) -> None:
    (document,) = documents(COMPOSE / "compose.yaml")
    named = [secret["file"] for secret in document["secrets"].values()]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                named.append(source)
            else:
                assert source in document["volumes"]
        build = service.get("build")
        if build:
            named.append(f"{build['context']}/{build['dockerfile']}")
    assert len(named) >= 6
    assert [name for name in named if not (COMPOSE / name).exists()] == []


def test_the_server_has_few_rights_and_time_to_drain(services: dict[str, Any]) -> None:
    server = services["pageturner"]
    loaded = load_config(None, server["environment"])
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert not server["user"].startswith("0")
    grace = float(server["stop_grace_period"].removesuffix("s"))
    assert grace > loaded.config.server.drain_seconds + loaded.config.server.abort_seconds
    admin = loaded.config.server.admin_address
    assert admin is not None
    folder = admin.host.removeprefix("unix:").rpartition("/")[0]
    assert any(mount.startswith(f"{folder}:") for mount in server["tmpfs"])
    assert server["healthcheck"]["test"][-2:] == ["--target", admin.host]


def test_nothing_is_published_beyond_this_machine(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert len(ports) == 4
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)


def test_prometheus_and_grafana_find_what_they_show() -> None:
    (prometheus,) = documents(COMPOSE / "prometheus.yaml")
    (job,) = prometheus["scrape_configs"]
    assert job["job_name"] == "pageturner"
    assert job["static_configs"] == [{"targets": ["pageturner:9464"]}]
    (datasource,) = documents(COMPOSE / "grafana-datasource.yaml")
    assert datasource["datasources"][0]["url"] == "http://prometheus:9090"
    (provider,) = documents(COMPOSE / "grafana-provisioning.yaml")
    assert provider["providers"][0]["options"]["path"] == "/etc/dashboards"
