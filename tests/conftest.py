"""Skips tests that need more GPUs than the machine has."""

import pytest
import torch


def _gpus_needed(item: pytest.Item) -> int:
    needed = [1 for _ in item.iter_markers("gpu")]
    needed += [marker.kwargs.get("n", 2) for marker in item.iter_markers("multigpu")]
    return max(needed, default=0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = _gpus_needed(item)
    if needed > torch.cuda.device_count():
        pytest.skip(f"needs {needed} CUDA device(s), found {torch.cuda.device_count()}")
