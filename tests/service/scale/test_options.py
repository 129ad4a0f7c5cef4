"""Arguments of an application: what is stated is shipped as meant, what is wrong is refused by name."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pageturner.policies.spec import PolicySpec
from pageturner.service.errors import ConfigError
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.scale.options import _OF_ONE_SERVER, ScaleOptions, read_arguments


def test_tables_and_dotted_text_mean_the_same() -> None:
    tables = read_arguments(
        {
            "scale": {"min_replicas": 2, "max_replicas": 5, "routing": "least-tokens"},
            "cache": {"num_blocks": 64},
            "policies": {"victim": "last-arrived"},
        }
    )
    texts = read_arguments(
        {
            "scale.min_replicas": "2",
            "scale.max_replicas": "5",
            "scale.routing": "least-tokens",
            "cache.num_blocks": "64",
            "policies.victim": "last-arrived",
        }
    )
    assert tables == texts
    assert tables.scale.routing == PolicySpec("least-tokens")
    assert not tables.scale.is_fixed


def test_every_machine_reads_what_was_stated_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        '[cache]\nnum_blocks = 32\nswap_space = "1MiB"\n'
        '[policies]\nqueue = { name = "priority", aging_seconds = 30.0 }\n'
        '[policies.shadow]\nvictim = "last-arrived"\n'
    )
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = read_arguments({"config": str(file), "model": {"source": "model"}, "scale": {"num_cpus": 2.5}})
    monkeypatch.setenv("PAGETURNER_CACHE_NUM_BLOCKS", "16")
    loaded = pickle.loads(pickle.dumps(settings)).load().config
    assert loaded.cache.num_blocks == 32
    assert loaded.cache.swap_space == 1 << 20
    assert loaded.policies.queue == PolicySpec("priority", {"aging_seconds": 30.0})
    assert loaded.policies.shadow == {"victim": PolicySpec("last-arrived")}
    assert loaded.model.source == str(tmp_path / "model")
    assert loaded.model.num_threads == 2


def test_paths_are_those_of_where_the_application_is_deployed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas run in folders of their own."""
    monkeypatch.chdir(tmp_path)
    settings = read_arguments(
        {"auth.identities": "identities.toml", "adapters": {"folder": "all", "load": {"sql": "all/sql"}}}
    )
    loaded = pickle.loads(pickle.dumps(settings)).load().config
    assert loaded.auth.identities == tmp_path / "identities.toml"
    assert loaded.adapters.folder == tmp_path / "all"
    assert loaded.adapters.load == {"sql": str(tmp_path / "all/sql")}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"scale": {"min_replicas": 0}}, "scale.min_replicas"),
        ({"scale": {"min_replicas": 3, "max_replicas": 2}}, "scale.max_replicas"),
        ({"scale": {"min_replica": 3}}, "scale.min_replica"),
        ({"scale": {"min_replicas": "many"}}, "scale.min_replicas"),
        ({"scale": {"target_busy": 1.5}}, "scale.target_busy"),
        ({"scale": {"num_cpus": 0}}, "scale.num_cpus"),
        ({"scale": {"num_gpus": -1.0}}, "scale.num_gpus"),
        ({"scale": {"target_queued_tokens": 0}}, "scale.target_queued_tokens"),
        ({"scale": {"report_seconds": float("nan")}}, "scale.report_seconds"),
        ({"scale": {"downscale_delay_seconds": -1.0}}, "scale.downscale_delay_seconds"),
        ({"cache": {"num_block": 3}}, "cache.num_block"),
        ({"modle": {"source": "x"}}, "modle.source"),
        ({"model": "embedded"}, "model"),
        ({"config": 3}, "config"),
        ({"config": "/nowhere.toml"}, "/nowhere.toml"),
        ({"server": {"port": 50051}}, "server.port"),
        ({"server": {"enable_admin": False}}, "server.enable_admin"),
        ({"server": {"max_connections": 8}}, "server.max_connections"),
        ({"server.drain_seconds": "5"}, "server.drain_seconds"),
        ({"metrics": {"port": 9464}}, "metrics.port"),
        ({"cache": {"prefix_key_file": "key"}}, "cache.prefix_key_file"),
        ({"model": {"tensor_parallel_port": 7000}}, "model.tensor_parallel_port"),
        ({"tls.certificate": "c.pem", "tls.key": "k.pem"}, "tls.certificate"),
    ],
)
def test_a_bad_argument_is_refused_by_its_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_arguments(arguments)
    assert caught.value.key == named


def test_defaults_are_one_replica_routed_by_prefix() -> None:
    assert read_arguments({}).scale == ScaleOptions()
    assert ScaleOptions().is_fixed
    assert ScaleOptions().routing == PolicySpec("prefix-aware")


def test_each_key_of_a_server_is_obeyed_or_refused() -> None:
    """Those that are obeyed, and by whom, are listed here: a key that is added has to be looked at."""
    obeyed = {
        "max_request_bytes",  # the ingress
        "max_abort_ids",  # servicers in the replicas, this and the rest
        "malloc_arenas",
        "log_prompts",
        "allow_policy_imports",
    }
    refused = {key.partition(".")[2] for key in _OF_ONE_SERVER if key.startswith("server.")}
    assert obeyed | refused == {each.name for each in fields(ServerOptions)}
    assert not obeyed & refused
