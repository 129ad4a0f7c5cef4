"""What the sections [metrics] and [traces] take."""

from __future__ import annotations

from typing import Any

import pytest

from pageturner.service.config import load_config
from pageturner.service.errors import ConfigError
from pageturner.service.monitoring.options import MetricsOptions


@pytest.mark.parametrize(
    ("key", "value"),
    [("host", ""), ("host", "unix:/tmp/x"), ("port", -1), ("port", 65536), ("max_tenants", -1)],
)
def test_a_wrong_option_is_told_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"metrics\.{key}: "):
        MetricsOptions(**{key: value})


def test_nothing_is_listened_on_unless_a_port_is_configured() -> None:
    assert load_config(environ={}).config.metrics.port is None
    loaded = load_config(environ={"PAGETURNER_METRICS_PORT": "9464"})
    assert loaded.config.metrics.port == 9464


def test_kubernetes_variables_of_a_service_for_the_metrics_are_left_alone() -> None:
    loaded = load_config(environ={"PAGETURNER_METRICS_PORT": "tcp://10.0.0.1:9464"})
    assert loaded.config.metrics.port is None
    assert loaded.service_variables == ("PAGETURNER_METRICS_PORT",)
