"""Measures one step of a pipeline rank: the seconds of each action, and what each stage's chunks save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.device.backend import Event
from offload.device.select import get_backend
from offload.planning.pipeline_order import Action
from offload.planning.profile import StageProfile


class Probe:
    """The measurements of one step.

    Args:
        device: Where the stages run.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = get_backend(device)
        self._saved_bytes: dict[int, int] = {}
        self._marks: defaultdict[tuple[int, str], list[tuple[Event, Event]]] = defaultdict(list)

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Measure the block as ``action``."""
        start = self._backend.mark()
        yield
        self._marks[action.stage, action.kind].append((start, self._backend.mark()))

    def count(self, stage: int, saved_bytes: int) -> None:
        """Note the size of the activation set of one of the stage's chunks."""
        self._saved_bytes[stage] = max(saved_bytes, self._saved_bytes.get(stage, 0))

    def profile(self) -> dict[int, StageProfile]:
        """What was measured; of several chunks the fastest counts, as the first ones also load kernels."""
        return {
            stage: StageProfile(
                self._fastest_s(stage, "F"),
                self._fastest_s(stage, "B") or self._fastest_s(stage, "I"),
                self._fastest_s(stage, "W"),
                saved_bytes,
            )
            for stage, saved_bytes in self._saved_bytes.items()
        }

    def _fastest_s(self, stage: int, kind: str) -> float:
        return min(self._backend.seconds(self._marks[stage, kind]), default=0.0)
