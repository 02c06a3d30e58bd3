"""The benchmark of optimizer state runs all of its rows at a small size, and leaves out what begins too late."""

from pathlib import Path

import pytest
from small_run import record_of

from benchmarks import optimizer_state

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


def test_every_row(tmp_path: Path) -> None:
    record = record_of(optimizer_state, tmp_path / "record.json")
    assert record["equal"] == {way: True for way in optimizer_state.WAYS if way != "resident"}
    rows = record["rows"]
    assert [(row["what"], row["microbatches"]) for row in rows[:-1]] == [
        (way, microbatches)
        for way in optimizer_state.WAYS
        for microbatches in ((1,) if way in optimizer_state.NO_CLIPPING else (1, 4))
    ]
    resident, *others = [row for row in rows[:-1] if row["microbatches"] == 1]
    assert resident["link_bytes"] == resident["pinned_bytes"] == 0
    for row in others:
        if "GiB resident" in row["what"]:
            assert row["link_bytes"] == row["pinned_bytes"] == 0  # all state of the small model
            continue
        # Both moments, in float32, both ways.
        assert row["link_bytes"] == 2 * row["pinned_bytes"] > 0
        assert row["to_resident"] == pytest.approx(row["step_s"] / resident["step_s"], rel=1e-4)
        assert row["to_limit"] <= row["to_resident"]
    assert rows[-1]["skipped"] == "needs torchao and a GPU"
