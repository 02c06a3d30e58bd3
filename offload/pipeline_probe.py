"""Measures one step of a pipeline rank: the seconds of each action, and what each stage's chunks save."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.pipeline_order import Action
from offload.profile import StageProfile


class Probe:
    """The measurements of one step.

    Args:
        device: Where the stages run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._saved_bytes: dict[int, int] = {}
        self._marks: defaultdict[tuple[int, str], list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Measure the block as ``action``."""
        start = self._mark()
        yield
        self._marks[action.stage, action.kind].append((start, self._mark()))

    def count(self, stage: int, saved_bytes: int) -> None:
        """Note the size of the activation set of one of the stage's chunks."""
        self._saved_bytes[stage] = max(saved_bytes, self._saved_bytes.get(stage, 0))

    def profile(self) -> dict[int, StageProfile]:
        """What was measured; of several chunks the fastest counts, as the first ones also load kernels."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return {
            stage: StageProfile(
                self._fastest_s(stage, "F"),
                self._fastest_s(stage, "B") or self._fastest_s(stage, "I"),
                self._fastest_s(stage, "W"),
                saved_bytes,
            )
            for stage, saved_bytes in self._saved_bytes.items()
        }

    def _mark(self) -> Any:
        """A point in the compute stream's time."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def _fastest_s(self, stage: int, kind: str) -> float:
        marks = self._marks[stage, kind]
        if self._device.type == "cpu":
            return min((end - start for start, end in marks), default=0.0)
        return min((start.elapsed_time(end) / 1e3 for start, end in marks), default=0.0)
