"""The configuration: three sources in order, faults named by their key, a print-out that reads back."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.policies.spec import PolicySpec
from pageturner.service.config import (
    KEYS,
    OPENMP_SPINS,
    SECTIONS,
    LoadedConfig,
    cache_directory,
    calm_openmp,
    load_config,
    local_gloo,
    quiet_grpc,
)
from pageturner.service.errors import ConfigError, RankLost

ROOT = Path(__file__).resolve().parents[2]


def load(
    toml: str | None = None,
    tmp_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    **flags: str,
) -> LoadedConfig:
    path = None
    if toml is not None:
        assert tmp_path is not None
        path = tmp_path / "pageturner.toml"
        path.write_text(toml)
    return load_config(path, environ or {}, {name.replace("__", "."): text for name, text in flags.items()})


def test_defaults_are_those_of_the_layers() -> None:
    loaded = load()
    assert loaded.origins == {}
    for key, value in loaded.config:
        assert value == key.default, key


def test_flags_go_over_the_environment_over_the_file(tmp_path: Path) -> None:
    toml = "[cache]\nblock_size = 8\nnum_blocks = 10\n[scheduler]\nmax_num_seqs = 3\n"
    environ = {"PAGETURNER_CACHE_BLOCK_SIZE": "32", "PAGETURNER_CACHE_NUM_BLOCKS": "20"}
    loaded = load(toml, tmp_path, environ, cache__block_size="64")
    assert loaded.config.cache.block_size == 64
    assert loaded.config.cache.num_blocks == 20
    assert loaded.config.scheduler.max_num_seqs == 3
    assert loaded.origins == {
        "cache.block_size": "the command line",
        "cache.num_blocks": "environment PAGETURNER_CACHE_NUM_BLOCKS",
        "scheduler.max_num_seqs": str(tmp_path / "pageturner.toml"),
    }


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("[cache]\nblock_size = 4\n")
    assert load_config(None, {"PAGETURNER_CONFIG": str(path)}).config.cache.block_size == 4


def test_other_variables_of_the_prefix_are_left_alone() -> None:
    assert load(environ={"PAGETURNER_PORT": "tcp://10.0.0.1:80", "PAGETURNER_X_Y": "1"}).origins == {}


@pytest.mark.parametrize(
    ("toml", "key", "hint"),
    [
        ("[cache]\nblok_size = 1\n", "cache.blok_size", "did you mean cache.block_size?"),
        ("[scheduler]\nblock_size = 1\n", "scheduler.block_size", "did you mean cache.block_size?"),
        ("[sheduler]\nmax_num_seqs = 1\n", "sheduler", "did you mean scheduler?"),
        ("block_size = 1\n", "block_size", "did you mean cache.block_size?"),
        ('[cache]\nblock_size = "16"\n', "cache.block_size", "not a whole number"),
        ("[cache]\nblock_size = 1.5\n", "cache.block_size", "not a whole number"),
        (f"[scheduler]\nwatermark = {'9' * 400}\n", "scheduler.watermark", "beyond the range of a double"),
        ("[cache]\nblock_size = true\n", "cache.block_size", "not a whole number"),
        ("[cache]\nblock_size = 0\n", "cache.block_size", "not in [1, 4096]"),
        ("[cache]\nenable_prefix_caching = 1\n", "cache.enable_prefix_caching", "not true or false"),
        ("[cache]\nswap_space = 4\n", "cache.swap_space", "write 4GiB"),
        ("[cache]\nswap_space = -1\n", "cache.swap_space", "negative"),
        ('[cache]\nkv_cache_memory = "2 parsecs"\n', "cache.kv_cache_memory", "no size"),
        ('[cache]\nnum_blocks = 1\nkv_cache_memory = "1GiB"\n', "cache.num_blocks", "give one of them"),
        ("[scheduler]\nmax_num_seqs = 4294967296\n", "scheduler.max_num_seqs", "not in [1, 2147483647]"),
        ("[scheduler]\nwatermark = nan\n", "scheduler.watermark", "not finite"),
        ("[scheduler]\nwatermark = 1.5\n", "scheduler.watermark", "not in"),
        ('[model]\ndtype = "fp8"\n', "model.dtype", "none of"),
        ('[log]\nlevel = "loud"\n', "log.level", "none of"),
        ('[policies]\nqueue = "nosuch"\n', "policies.queue", "nosuch"),
        ('[policies]\nqueue = { name = "fcfs", nosuch = 1 }\n', "policies.queue", "nosuch"),
        ("[policies]\nqueue = 3\n", "policies.queue", "has no name"),
        ("server = 3\n", "server", "is a section, [server], not a value"),
        ("[policies]\nvictims = 'x'\n", "policies.victims", "did you mean policies.victim?"),
    ],
)
def test_a_fault_in_the_file_is_named(tmp_path: Path, toml: str, key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(toml, tmp_path)
    assert caught.value.key == key
    assert hint in caught.value.reason


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000])
def test_a_file_beyond_what_its_reader_can_hold_is_named(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[server]\nport = {value}\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(path, {})


@pytest.mark.parametrize("value", ["{ a = " * 5000, "{ a = " + "9" * 5000 + " }"])
def test_a_flag_beyond_what_its_reader_can_hold_is_named(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {"policies.shadow": value})
    assert caught.value.key == "policies.shadow"


def test_a_fault_names_the_variable_it_came_from() -> None:
    with pytest.raises(ConfigError, match=r"cache\.block_size: 'x' .*PAGETURNER_CACHE_BLOCK_SIZE"):
        load(environ={"PAGETURNER_CACHE_BLOCK_SIZE": "x"})
    with pytest.raises(ConfigError, match=r"cache\.blok_size: unknown key; did you mean cache\.block_size"):
        load(environ={"PAGETURNER_CACHE_BLOK_SIZE": "1"})


@pytest.mark.fault("2")
@pytest.mark.parametrize(
    "variables",
    [
        {
            "PAGETURNER_SERVER_PORT": "tcp://10.0.0.9:50051",
            "PAGETURNER_SERVER_SERVICE_HOST": "10.0.0.9",
            "PAGETURNER_SERVER_SERVICE_PORT": "50051",
            "PAGETURNER_SERVER_SERVICE_PORT_GRPC": "50051",
            "PAGETURNER_SERVER_PORT_50051_TCP": "tcp://10.0.0.9:50051",
            "PAGETURNER_SERVER_PORT_50051_TCP_PROTO": "tcp",
            "PAGETURNER_SERVER_PORT_50051_TCP_PORT": "50051",
            "PAGETURNER_SERVER_PORT_50051_TCP_ADDR": "10.0.0.9",
        },
        {"PAGETURNER_MODEL_SERVICE_PORT": "80", "PAGETURNER_MODEL_PORT": "udp://10.0.0.9:80"},
        {"PAGETURNER_LOG_STORE_PORT_80_UDP_ADDR": "10.0.0.9", "PAGETURNER_LOG_STORE_PORT": "sctp://[::1]:80"},
    ],
    ids=["server", "model", "longer-name"],
)
def test_variables_that_kubernetes_sets_for_a_service_are_left_alone(variables: dict[str, str]) -> None:
    loaded = load(environ=variables)
    assert loaded.config == load().config
    assert loaded.service_variables == tuple(sorted(variables))


@pytest.mark.fault("2")
def test_a_port_of_the_operator_beside_service_variables_is_obeyed() -> None:
    loaded = load(environ={"PAGETURNER_SERVER_PORT": "50071", "PAGETURNER_SERVER_SERVICE_PORT": "80"})
    assert loaded.config.server.port == 50071
    with pytest.raises(ConfigError, match=r"server\.port: 'http://x' is not a whole number"):
        load(environ={"PAGETURNER_SERVER_PORT": "http://x"})


@pytest.mark.fault("26")
def test_bytes_that_are_no_text_are_refused_with_the_key() -> None:
    for source in ({"environ": {"PAGETURNER_MODEL_SOURCE": "caf\udce9"}}, {"model__source": "caf\udce9"}):
        with pytest.raises(ConfigError, match=r"'caf\\xe9' is not text") as caught:
            load(**source)
        assert caught.value.key == "model.source"


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read"):
        load_config(tmp_path / "gone.toml", {})
    with pytest.raises(ConfigError, match="is not TOML"):
        load("[cache\n", tmp_path)


def test_sizes_take_units(tmp_path: Path) -> None:
    cache = load('[cache]\nkv_cache_memory = "1.5GiB"\nswap_space = "500 MB"\n', tmp_path).config.cache
    assert cache.kv_cache_memory == 3 << 29
    assert cache.swap_space == 500_000_000
    assert load(cache__swap_space="0").config.cache.swap_space == 0


def test_a_model_may_lie_at_home() -> None:
    assert load(model__source="~/llama").config.model.source == str(Path.home() / "llama")


def test_none_takes_an_optional_value_back(tmp_path: Path) -> None:
    loaded = load("[cache]\nnum_blocks = 10\n", tmp_path, cache__num_blocks="none")
    assert loaded.config.cache.num_blocks is None


def test_every_axis_has_a_default_and_takes_a_table(tmp_path: Path) -> None:
    policies = load().config.policies
    assert isinstance(policies.create(), PolicySet)
    assert [spec.name for spec in dataclasses.fields(policies)] == [*AXES, "preset", "shadow"]
    chosen = load(environ={"PAGETURNER_POLICIES_QUEUE": '{ name = "fcfs" }'}).config.policies
    assert chosen.queue == PolicySpec("fcfs")


def test_known_tenants_are_served_alike_by_default_and_what_is_given_goes_over_that(tmp_path: Path) -> None:
    file = tmp_path / "pageturner.toml"
    file.write_text('[auth]\nidentities = "identities.toml"\n')
    loaded = load_config(file, {})
    policies = loaded.config.policies
    assert (policies.queue.name, policies.victim.name) == ("virtual-token-counter", "most-over-served")
    assert loaded.config.scheduler.share_between_tenants
    assert loaded.origins["policies.queue"] == "auth.identities"
    assert 'queue = "virtual-token-counter"  # from auth.identities' in loaded.to_toml()
    given = load_config(file, {}, {"policies.queue": "fcfs", "scheduler.share_between_tenants": "false"})
    assert (given.config.policies.queue.name, given.config.policies.victim.name) == (
        "fcfs",
        "most-over-served",
    )
    assert not given.config.scheduler.share_between_tenants
    preset = load_config(file, {}, {"policies.preset": "vllm-v1"}).config.policies
    assert (preset.queue.name, preset.victim.name) == ("fcfs", "last-arrived")
    assert load_config(None, {}).config.policies.queue.name == "fcfs"


def test_a_preset_goes_under_what_is_given(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[policies]\npreset = "vllm-v1"\nvictim = "least-computed"\n')
    loaded = load_config(file, {})
    policies = loaded.config.policies
    assert (policies.victim.name, policies.reclaim.name) == ("least-computed", "always-recompute")
    assert loaded.config.scheduler.watermark == 0.0
    assert loaded.origins["policies.reclaim"] == loaded.origins["scheduler.watermark"] == "preset vllm-v1"
    file.write_text('[policies]\npreset = "vllm-v1"\n[scheduler]\nwatermark = 0.2\n')
    assert load_config(file, {}).config.scheduler.watermark == 0.2
    file.write_text(loaded.to_toml())
    assert load_config(file, {}).config == loaded.config
    with pytest.raises(ConfigError, match="did you mean 'vllm-v1'") as caught:
        load(environ={"PAGETURNER_POLICIES_PRESET": "vllm-v2"})
    assert caught.value.key == "policies.preset"


def test_shadows_are_a_table_of_policies(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[policies.shadow]\nvictim = "last-arrived"\nreclaim = { name = "cost-model" }\n')
    loaded = load_config(file, {})
    assert set(loaded.config.policies.create_shadows()) == {"victim", "reclaim"}
    file.write_text(loaded.to_toml())
    assert load_config(file, {}).config == loaded.config
    given = load(environ={"PAGETURNER_POLICIES_SHADOW": '{ victim = "last-arrived" }'})
    assert given.config.policies.shadow == {"victim": PolicySpec("last-arrived")}
    for text, key in (('{ victims = "x" }', "policies.shadow.victims"), ("x", "policies.shadow")):
        with pytest.raises(ConfigError) as caught:
            load(environ={"PAGETURNER_POLICIES_SHADOW": text})
        assert caught.value.key == key


TEXTS: dict[str, st.SearchStrategy[str]] = {
    "model.source": st.text(st.characters(exclude_categories=["C"]), min_size=1),
    "model.device": st.sampled_from(["auto", "cpu", "cuda", "cuda:1"]),
    "model.allow_fallback": st.sampled_from(["true", "false"]),
    "model.dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    "model.num_threads": st.one_of(st.just("none"), st.integers(1, 64).map(str)),
    "model.deterministic": st.sampled_from(["true", "false", "on", "0"]),
    "cache.swap_space": st.one_of(
        st.integers(1 << 16, 1 << 50).map(str), st.integers(1, 99).map("{}GiB".format)
    ),
    "cache.kv_cache_memory": st.one_of(st.just("none"), st.integers(1, 99).map("{}MiB".format)),
    "cache.block_size": st.integers(1, 4096).map(str),
    "scheduler.watermark": st.floats(0, 0.9).map(str),
    "policies.queue": st.sampled_from(["fcfs", '{ name = "fcfs" }']),
}


@given(st.fixed_dictionaries({}, optional=TEXTS))
def test_the_print_out_reads_back(tmp_path_factory: pytest.TempPathFactory, flags: dict[str, str]) -> None:
    loaded = load_config(None, {}, flags)
    path = tmp_path_factory.mktemp("config") / "printed.toml"
    path.write_text(loaded.to_toml(), encoding="utf-8")
    assert load_config(path, {}).config == loaded.config


def test_the_print_out_has_every_key_once() -> None:
    printed = load().to_toml()
    document = tomllib.loads(printed)
    assert tuple(document) == SECTIONS
    for key, value in load().config:
        if value is None:
            assert f"# {key.name} is not set" in printed
        else:
            assert key.name in document[key.section]


def test_every_key_has_a_default_and_a_sentence() -> None:
    for key in KEYS.values():
        assert key.default is not dataclasses.MISSING, key
        assert key.doc, f"{key} is not explained in its section's docstring"


def test_the_cache_directory_follows_xdg(tmp_path: Path) -> None:
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "pageturner"
    assert cache_directory({}) == Path.home() / ".cache" / "pageturner"


@pytest.mark.fault("27")
def test_a_user_without_a_home_folder_has_a_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory({}) == Path("/.cache/pageturner")
    assert cache_directory({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/pageturner")


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "0"}, {"OMP_WAIT_POLICY": "active"}])
def test_how_openmp_waits_is_set_unless_the_environment_says_it(chosen: dict[str, str]) -> None:
    environ = {"OMP_NUM_THREADS": "2"}
    calm_openmp(environ)
    assert environ == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": str(OPENMP_SPINS)}
    kept = dict(chosen)
    calm_openmp(kept)
    assert kept == chosen


def test_grpc_writes_errors_alone_unless_the_environment_says_it() -> None:
    environ: dict[str, str] = {}
    quiet_grpc(environ)
    assert environ == {"GRPC_VERBOSITY": "ERROR"}
    kept = {"GRPC_VERBOSITY": "DEBUG"}
    quiet_grpc(kept)
    assert kept == {"GRPC_VERBOSITY": "DEBUG"}


def test_gloo_listens_on_the_loopback_interface_only_while_it_is_asked_to() -> None:
    environ: dict[str, str] = {}
    with suppress(RankLost), local_gloo(environ):
        assert environ == {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
        raise RankLost("not all came")
    assert environ == {}
    kept = {"GLOO_SOCKET_IFNAME": "eth0"}
    with local_gloo(kept):
        assert kept == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert kept == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_serving_sets_it_before_torch_reads_it() -> None:
    program = (
        "import argparse, os, pathlib, sys\n"
        "from pageturner.service.commands import serve\n"
        "from pageturner.service.errors import ConfigError\n"
        "try: serve.run(argparse.Namespace(record=pathlib.Path('/')))\n"
        "except ConfigError: print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=environ, capture_output=True, text=True)
    assert done.stdout.split() == [str(OPENMP_SPINS), "False"], done.stderr


AMBIENT = {"environ", "environb", "getenv", "expanduser", "expandvars", "putenv", "home"}


def ambient_reads(tree: ast.AST) -> Iterator[str]:
    """Where a module touches the environment, or what stands for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in AMBIENT:
            yield f"line {node.lineno}: .{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"line {node.lineno}: {name.name}" for name in node.names if name.name in AMBIENT)


def test_the_search_for_ambient_reads_finds_them() -> None:
    for source in (
        "os.environ['A']",
        "import os as o\no.getenv('A')",
        "from os import environ",
        "Path.home()",
    ):
        assert list(ambient_reads(ast.parse(source))), source


def test_only_the_configuration_reads_the_environment() -> None:
    found = {
        str(path.relative_to(ROOT)): reads
        for package in ("policies", "kernels", "service", "loadtest")
        for path in (ROOT / package).rglob("*.py")
        if (reads := list(ambient_reads(ast.parse(path.read_text(encoding="utf-8")))))
    }
    # The clients read what gRPC itself reads there, to name a proxy in an error.
    clients = {"service/client/targets.py", "loadtest/channel.py"}
    # Another engine's server inherits the environment, and a few variables more.
    peers = {"loadtest/peers/processes.py"}
    assert set(found) == {"service/config.py"} | clients | peers, found
