"""The benchmark of weight streaming runs, and compares what it says it compares."""

import pytest
from small_run import record_of

from benchmarks import weight_streaming

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The record of a run at a small size on the CPU."""
    return record_of(weight_streaming, tmp_path_factory.mktemp("weights") / "weights.json", "--repeats", "1")


def test_each_case_is_beside_its_limit(record):
    assert [row["case"] for row in record["rows"]] == ["few", "many"]
    for row in record["rows"]:
        forward_s = max(row["compute_forward_s"], row["link_forward_s"])
        backward_s = max(row["compute_backward_s"], row["link_backward_s"])
        assert row["limit_s"] == pytest.approx(forward_s + backward_s, rel=1e-4)
        # Two slots for six layers: forward loads all of them, backward all that the slots do not hold.
        assert row["loads_per_step"] == 10


def test_the_host_holds_what_is_accounted_for(record):
    assert record["stats"]["weight_bytes"] == record["weight_bytes"]
    assert record["stats"]["gradient_host_bytes"] == record["weight_bytes"]


def test_losses_are_the_same_where_both_round_alike(record):
    curves = {row["optimizer"]: row for row in record["loss_curves"]}
    assert len(curves) == 7
    for name, row in curves.items():
        on_device, streamed = row["losses"]
        assert len(on_device) == len(streamed) == row["steps"] == 3
        assert on_device[-1] < on_device[0]
        if name.startswith("SGD") or name.endswith("on the host"):
            assert row["identical"], name
            assert on_device == streamed, name
