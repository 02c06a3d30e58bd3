"""The snapshot of the counters."""

import dataclasses

import pytest
from lab import Lab
from models import build, loss_of, offloading

from offload import OffloadStats
from offload.stats import Counters


def test_names_of_the_stats_hold_their_units() -> None:
    names = {item.name for item in dataclasses.fields(OffloadStats)}
    assert names >= {
        "offloaded_bytes",
        "offloaded_tensors",
        "reloaded_bytes",
        "skipped",
        "pinned_bytes",
        "peak_resident_bytes",
        "wasted_bytes",
    }


def test_snapshot_is_frozen() -> None:
    counters = Counters()
    counters.skipped["small"] += 1
    snapshot = counters.snapshot(pinned_bytes=4096)
    counters.skipped["small"] += 1
    counters.offloaded_bytes += 1
    assert snapshot == OffloadStats(skipped={"small": 1}, pinned_bytes=4096)
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.offloaded_bytes = 1  # type: ignore[misc]


def test_peak_of_resident_bytes() -> None:
    counters = Counters()
    counters.hold(100)
    counters.hold(50)
    counters.drop(100)
    counters.hold(20)
    assert counters.snapshot(0).peak_resident_bytes == 150


def test_shown_with_units() -> None:
    shown = str(OffloadStats(offloaded_bytes=3 << 20, offloaded_tensors=2, skipped={"parameter": 4}))
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert lines["offloaded_bytes"] == "3.0 MiB"
    assert lines["offloaded_tensors"] == "2"
    assert lines["skipped"] == "{'parameter': 4}"


def test_counts_grow_alike_from_step_to_step(lab: Lab) -> None:
    layers, x = build("decoder", 5, lab.device)
    offloaded = offloading(3, 5, lab.device)
    snapshots = [offloaded.stats]
    for _ in range(3):
        loss_of(offloaded.forward(layers, x)).backward()
        snapshots.append(offloaded.stats)
    for name in ("offloaded_bytes", "offloaded_tensors", "offloaded_storages", "reloaded_bytes"):
        counts = [getattr(snapshot, name) for snapshot in snapshots]
        assert counts == [0, counts[1], 2 * counts[1], 3 * counts[1]]
        assert counts[1] > 0
    assert snapshots[1].peak_resident_bytes == snapshots[3].peak_resident_bytes > 0
    assert snapshots[1].pinned_bytes == snapshots[3].pinned_bytes >= snapshots[1].peak_resident_bytes
