"""What is not offloaded is remembered by its storage, for as long as the storage lives."""

import pytest
import torch
from models import Product
from torch import nn

from offload import mark_not_offload, offload_layers
from offload.activations import what_moves as exclusions
from offload.activations.what_moves import Parts, Rules, decide

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusions, "_excluded", exclusions._Exclusions())


def why(tensor: torch.Tensor, min_bytes: int = 0) -> str | Parts | None:
    """The reason to stay, or the parts; ``None`` for what is offloaded."""
    decision = decide(tensor, Rules(CPU, min_bytes))
    return None if isinstance(decision, type) else decision


def test_casts_of_activations_and_what_lies_in_a_marked_storage() -> None:
    for given in (torch.ones(4, requires_grad=True) * 2, torch.ones(4, requires_grad=True)):
        assert why(given.to(torch.bfloat16)) is None
    tensor = torch.ones(8)
    assert why(tensor) is None
    mark_not_offload(tensor[2:4], None)
    assert why(tensor.view(2, 4)[1]) == "marked"


def test_parameters_of_offloaded_layers_are_known_before_one_is_saved() -> None:
    layers = nn.ModuleList(Product(8) for _ in range(4))
    x = torch.randn(4, 8, requires_grad=True)
    with offload_layers(layers, 2, min_bytes=0, device="cpu") as handle:
        y = x
        for layer in layers:
            y = layer(y)
        y.sum().backward()
        stats = handle.stats()
    assert stats.skipped["parameter"] == 2
    assert stats.offloaded_bytes == 4 * 8 * 4, "the second layer's input; the first one's is a leaf"


def test_parameters_without_a_shape_yet_are_passed_over() -> None:
    layers = nn.ModuleList(nn.LazyLinear(8) for _ in range(3))
    with offload_layers(layers, 1, min_bytes=0, device="cpu"):
        nn.Sequential(*layers)(torch.randn(4, 8, requires_grad=True) * 2).sum().backward()


def test_marking_takes_tensors() -> None:
    with pytest.raises(TypeError, match="mark_not_offload takes tensors, got int"):
        mark_not_offload(torch.ones(1), 3)


def test_memory_that_is_reused_is_not_taken_for_the_old() -> None:
    """A new storage, perhaps at the address of one that was marked and has gone, is not marked."""
    for _ in range(100):
        assert why(torch.ones(8)) is None
        mark_not_offload(torch.ones(8))


def test_what_has_gone_is_forgotten_in_time() -> None:
    kept = torch.ones(8)
    mark_not_offload(kept)
    for _ in range(5000):
        mark_not_offload(torch.ones(1))
    assert len(exclusions._excluded) < 3000
    assert why(kept) == "marked"
