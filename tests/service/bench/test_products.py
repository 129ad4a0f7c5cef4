"""`pageturner bench products` at the smallest sizes."""

from __future__ import annotations

import json

import pytest
from support.ops import cpu_cache_dir

from pageturner.service.bench import products
from pageturner.service.cli import main


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer and a head of a few outputs, and no machine but this one."""
    monkeypatch.setattr(products, "LAYER", ((32, 576), (16, 1536)))
    monkeypatch.setattr(products, "HEAD", (48, 576))
    monkeypatch.setattr(products, "NUM_LAYERS", 1)
    monkeypatch.setattr(products, "MACHINES", {})


@pytest.mark.usefixtures("tiny")
def test_every_contender_is_timed_at_every_number_of_rows() -> None:
    told: list[str] = []
    timings = products.measure_products(cpu_cache_dir(), (1, 3), 2, told.append)
    assert told == ["1 rows", "3 rows"]
    contenders = {timing.contender for timing in timings}
    assert "float32" in contenders
    assert len(contenders) >= 2
    assert len(timings) == 2 * len(contenders)
    for timing in timings:
        assert timing.milliseconds > 0
        assert timing.giga_multiplications_per_second == pytest.approx(
            timing.rows * (32 * 576 + 16 * 1536 + 48 * 576) / timing.milliseconds / 1e6
        )
    assert len(list(products.product_lines(timings))) == 2 + len(timings)


@pytest.mark.usefixtures("tiny")
def test_the_command_prints_the_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pageturner.service.commands.bench_products.cache_directory", cpu_cache_dir)
    assert main(["bench", "products", "--rows", "2", "--rounds", "1", "--json"]) == 0
    assert {timing["rows"] for timing in json.loads(capsys.readouterr().out)} == {2}
    assert main(["bench", "products", "--rows", "0,2"]) != 0
