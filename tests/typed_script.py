# pyright: standard
"""A user's script, which mypy (`make types`) and pyright (test_types.py) check, and which runs."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import offload
from offload import ManualOffloadSynchronizer, OffloadContext, OffloadStats, WeightStats


def forward(layers: nn.ModuleList, x: torch.Tensor, enabled: bool) -> OffloadStats:
    """By the drop-in context; enabled or not, its type is the same."""
    context, sync = offload.get_cpu_offload_context(enabled, num_layers=1, model_layers=4, min_bytes="0B", device="cpu")
    assert_type(context, OffloadContext)
    before = context.stats()
    for layer in layers:
        with context as entered:
            assert_type(entered, OffloadContext)
            x = layer(x)
        x = assert_type(sync(x), torch.Tensor)
    assert_type(sync((x, None)), tuple[torch.Tensor, None])
    x.sum().backward()
    return assert_type(context.stats() - before, OffloadStats)


def move_by_hand(layers: nn.ModuleList, x: torch.Tensor, enabled: bool) -> None:
    """By a manual synchronizer, whose calls do nothing if the context is not enabled."""
    context, sync, synchronizer = offload.get_cpu_offload_context(
        enabled=True, model_layers=4, manual_synchronization=True, device="cpu"
    )
    assert_type(synchronizer, ManualOffloadSynchronizer)
    with context:
        x = layers[0](x)
        synchronizer.start_offload_layer(0)
    sync(x)
    synchronizer.release_activation_forward_gpu_memory(0)
    _context, _sync, same = offload.get_cpu_offload_context(enabled, manual_synchronization=True, device="cpu")
    assert_type(same, ManualOffloadSynchronizer)


def main() -> None:
    """Everything, once."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    x = torch.randn(2, 8, requires_grad=True) * 2
    assert forward(layers, x, enabled=True).offloaded_bytes > 0
    assert forward(layers, x.detach(), enabled=False) == OffloadStats()
    move_by_hand(layers, x, enabled=False)
    with offload.offload_layers(layers, num_layers=1) as handle:
        assert_type(handle, offload.OffloadedLayers)
    with offload.stream_weights(layers) as streamed:
        assert_type(streamed.stats() - streamed.stats(), WeightStats)
    offload.remove(layers)


if __name__ == "__main__":
    main()
