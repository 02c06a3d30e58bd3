"""Starts the processes of a test that needs several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def run_ranks(worker: Path, world: int, device: str, folder: Path) -> list[dict[Any, Any]]:
    """What each rank of ``python WORKER RANK WORLD_SIZE DEVICE FOLDER`` left in ``FOLDER/RANK.pt``."""
    tests = Path(__file__).resolve().parent
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(world), device, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
