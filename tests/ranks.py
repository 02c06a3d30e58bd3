"""Starts the processes of a test that needs several."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from scripts import NO_GPU, TORCH, run_scripts


def run_ranks(worker: Path, world: int, device: str, folder: Path) -> list[dict[Any, Any]]:
    """What each rank of ``python WORKER RANK WORLD_SIZE DEVICE FOLDER`` left in ``FOLDER/RANK.pt``."""
    tests = Path(__file__).resolve().parent
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = run_scripts(
        [[str(worker), str(rank), str(world), device, str(folder)] for rank in range(world)],
        folder,
        environment | (NO_GPU if device == "cpu" else {}),
        imported=TORCH,
    )
    assert [rank.code for rank in done] == [0] * world, "\n".join(rank.output for rank in done)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
