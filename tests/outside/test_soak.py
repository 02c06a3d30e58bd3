"""Some hundred steps; ``python -m tests.outside soak`` runs ten thousand."""

from __future__ import annotations

import pytest
import torch
from lab import Lab

from . import soak

pytestmark = pytest.mark.slow

STEPS = 450  # all that takes turns comes round after 150


def test_nothing_grows(lab: Lab) -> None:
    found = soak.soak(lab.device, STEPS, 3, lambda _: None)
    for key in ("device_bytes", "pinned_bytes", "used_bytes"):
        assert found[key][1] == found[key][2], key
    assert found["objects"][2] - found["objects"][1] < STEPS // 10


def test_a_leak_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    train = soak._train

    def leak(*args: object) -> None:
        kept.append([])
        train(*args)

    monkeypatch.setattr(soak, "_train", leak)
    few = STEPS // 3
    found = soak.soak(torch.device("cpu"), few, 3, lambda _: None)
    assert found["objects"][2] - found["objects"][1] >= few // 10
