"""How tensors look into their storages."""

import pytest
import torch

from offload.base import tensors


def test_tensors_that_look_alike_share_a_geometry_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_geometries", {})
    monkeypatch.setattr(tensors, "MOST_GEOMETRIES", 2)
    one, other = (tensors.geometry_of(torch.empty(3, 4)) for _ in range(2))
    assert one is other
    for size in range(5):
        x = torch.rand(6, 7)[1:, size : size + 2]
        view = tensors.look_into(x.untyped_storage(), tensors.geometry_of(x))
        assert torch.equal(view, x)
        assert view.stride() == x.stride()
        assert len(tensors._geometries) <= 2
