"""The benchmark of long sequences runs every kind of row, and keeps those of other runs."""

from pathlib import Path
from typing import Any

import pytest
from small_run import record_of

from benchmarks import long_context

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torchao")]

pytest.importorskip("transformers")

LONG = ["256:inputs", "256:hand", "256:plan", "256:recompute", "64:equal"]
LIMITED = [f"1GiB:{way}" for way in long_context.LIMITED]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of two runs at a small size on the CPU; the second makes a row of the first again."""
    path: Path = tmp_path_factory.mktemp("long") / "long_context.json"
    record_of(long_context, path, "--seconds", "0", "--rows", *LONG, commit="the first")
    return record_of(long_context, path, "--seconds", "0", "--rows", "256:plan", *LIMITED, commit="the second")


def rows(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in record["rows"]}


def test_runs_are_merged(record: dict[str, Any]) -> None:
    assert sorted(rows(record)) == sorted([*LONG, *LIMITED])
    assert not [row for row in record["rows"] if "error" in row]
    assert record["profiled"] == 64
    assert {row["commit"] for row in record["rows"]} == {"the first", "the second"}
    assert rows(record)["256:plan"]["commit"] == "the second"
    assert all("date" in row for row in record["rows"])


def test_lengths_have_what_the_table_shows(record: dict[str, Any]) -> None:
    found = rows(record)
    for name in LONG[:4]:
        row = found[name]
        assert row["tokens_per_s"] == pytest.approx(256 / row["step_s"], rel=1e-4)
        assert row["host_bytes"] > 0
        assert row["stall_s"] >= 0
    # Two of four layers: their inputs, and the sines and cosines of all; attention's outputs, with a sum per head.
    hidden, angles, sums = 256 * 64 * 4, 2 * 256 * 16 * 4, 256 * 4 * 4
    assert found["256:inputs"]["host_bytes"] == 2 * hidden
    assert found["256:recompute"]["host_bytes"] == 2 * hidden + angles
    assert found["256:hand"]["host_bytes"] == 4 * hidden + 2 * sums + angles
    assert found["256:plan"]["planned_host_bytes"] <= 112 << 30


def test_it_is_the_same_training(record: dict[str, Any]) -> None:
    row = rows(record)["64:equal"]
    plain, loss = row["losses"]
    assert loss == pytest.approx(plain, rel=1e-6)
    one, other = row["gradient_norms"]
    assert other == pytest.approx(one, rel=1e-6)
    assert 0 < row["gradients_apart"] < 1e-5


def test_limits_have_the_longest_context_that_was_tried(record: dict[str, Any]) -> None:
    for name in LIMITED:
        row = rows(record)[name]
        assert row["longest_tokens"] == max(map(int, row["tried"])) >= 32
        assert row["shortest_failed_tokens"] is None
