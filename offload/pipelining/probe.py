"""Measure one step of a rank: the seconds of its actions and the bytes that its chunks save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from offload.device.backend import Backend, Event
from offload.pipelining.order import Action
from offload.pipelining.stage_profile import StageProfile


class ChunkBytes(NamedTuple):
    """The bytes that one chunk saved."""

    tensors: tuple[int, ...] = ()
    """The bytes of each tensor that may be offloaded, in the order of saving."""
    kept_bytes: int = 0


class Probe:
    """Measures one step of a rank."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._saved: dict[int, ChunkBytes] = {}
        self._weight_bytes: defaultdict[int, int] = defaultdict(int)
        self._marks: defaultdict[tuple[int, str], list[tuple[Event, Event]]] = defaultdict(list)

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Measure the block as ``action``."""
        before_bytes = self._allocated_bytes()
        start = self._backend.mark()
        yield
        self._marks[action.stage, action.kind].append((start, self._backend.mark()))
        if action.kind == "I":
            more_bytes = self._allocated_bytes() - before_bytes
            self._weight_bytes[action.stage] = max(more_bytes, self._weight_bytes[action.stage])

    def count(self, stage: int, saved: ChunkBytes) -> None:
        """Note what one of the stage's chunks has saved; the largest counts."""
        if stage not in self._saved or sum(saved.tensors) >= sum(self._saved[stage].tensors):
            self._saved[stage] = saved

    def profile(self) -> dict[int, StageProfile]:
        """The profile of each stage. Of several chunks the fastest counts, as the first ones also load kernels."""
        return {
            stage: StageProfile(
                forward_s=self._fastest_s(stage, "F"),
                backward_s=self._fastest_s(stage, "B") or self._fastest_s(stage, "I"),
                weight_s=self._fastest_s(stage, "W"),
                saved_bytes=sum(saved.tensors),
                tensors=saved.tensors,
                weight_bytes=self._weight_bytes[stage],
                kept_bytes=saved.kept_bytes,
            )
            for stage, saved in self._saved.items()
        }

    def _allocated_bytes(self) -> int:
        device = self._backend.device
        return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)

    def _fastest_s(self, stage: int, kind: str) -> float:
        return min(self._backend.seconds(self._marks[stage, kind]), default=0.0)
