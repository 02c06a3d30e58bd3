"""What one step of a rank costs: the seconds of its actions, what its chunks save, and what their backwards need."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from offload.device.backend import Backend, Event
from offload.pipelining.order import Action
from offload.pipelining.stage_profile import StageProfile


class Saved(NamedTuple):
    """What a chunk has saved, in the terms of :class:`~offload.pipelining.StageProfile`."""

    tensors: Sequence[int] = ()
    """The bytes of each tensor that may travel, in the order of saving."""
    last_saved: Sequence[int] = ()
    kept_bytes: int = 0


class DeviceMemory:
    """What the allocator of an accelerator says, in host time, as tensors come and go."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_bytes(self) -> int:
        """What is in use."""
        return torch.accelerator.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """The most that was in use since this was last asked."""
        found = torch.accelerator.max_memory_allocated(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        return found


class BackwardMemory:
    """How far memory rises while a chunk's backward asks for its tensors, from the last that was saved to the first.

    Args:
        memory: That of the device.
        tensors: How many tensors the chunk has saved.
    """

    def __init__(self, memory: DeviceMemory, tensors: int) -> None:
        self.rises = [-math.inf] * tensors
        """For each tensor, how far above where backward began, while it is the earliest asked for, if it ever is."""
        self._memory = memory
        self._begin_bytes = memory.allocated_bytes()
        self._asked = tensors - 1
        memory.peak_bytes()  # what was before may have needed more

    def ask(self, tensor: int) -> None:
        """Backward asks for a tensor: for the next, if it has not asked for an earlier one yet."""
        if tensor < self._asked:
            self.note()
            self._asked = tensor

    def note(self) -> None:
        """What was needed since backward has asked for the earliest tensor so far."""
        if self.rises:
            self.rises[self._asked] = max(self.rises[self._asked], self._memory.peak_bytes() - self._begin_bytes)


class Probe:
    """Measures one step of a rank."""

    def __init__(self, backend: Backend) -> None:
        self.memory = None if backend.device.type == "cpu" else DeviceMemory(backend.device)
        """What tells how much memory is in use; the CPU does not."""
        self._backend = backend
        self._saved: dict[int, Saved] = {}
        self._kept_bytes: dict[int, int] = {}
        self._weight_bytes: dict[int, int] = {}
        self._rises: dict[int, list[float]] = {}
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
            self._weight_bytes[action.stage] = max(more_bytes, self._weight_bytes.get(action.stage, 0))

    def count(self, stage: int, saved: Saved) -> None:
        """Note what one of the stage's chunks has saved."""
        self._kept_bytes[stage] = max(saved.kept_bytes, self._kept_bytes.get(stage, 0))
        if sum(saved.tensors) >= sum(self._saved.get(stage, Saved()).tensors):
            self._saved[stage] = saved

    def count_rises(self, stage: int, rises: Sequence[float]) -> None:
        """Note how far memory rose in the backward of one of the stage's chunks.

        Of several chunks the least counts, as the first ones also allocate gradients and the kernels' own memory.
        """
        before = self._rises.get(stage, rises)
        self._rises[stage] = list(map(min, before, rises)) if len(before) == len(rises) else list(rises)

    def profile(self) -> dict[int, StageProfile]:
        """What was measured; of several chunks the fastest counts, as the first ones also load kernels."""
        found = {}
        for stage, saved in self._saved.items():
            costs = StageProfile(
                self._fastest_s(stage, "F"),
                self._fastest_s(stage, "B") or self._fastest_s(stage, "I"),
                self._fastest_s(stage, "W"),
                sum(saved.tensors),
                tuple(saved.tensors),
                self._weight_bytes.get(stage, 0),
                self._kept_bytes[stage],
                last_saved=tuple(saved.last_saved),
            )
            found[stage] = replace(costs, workspace=self._workspace(costs, self._rises.get(stage, ())))
        return found

    def _workspace(self, costs: StageProfile, rises: Sequence[float]) -> tuple[int, ...]:
        """What backward needs beside what the profile counts anyway."""
        if len(costs.tensors) != len(rises):
            return ()
        known = []
        for so_far, nbytes in zip(accumulate(costs.due_bytes()), costs.due_bytes(), strict=True):
            behind_bytes = costs.saved_bytes - so_far
            if costs.weight_bytes:  # the set stays for the half for the weights, and more comes for that meanwhile
                known.append(costs.weight_bytes * (behind_bytes + nbytes) / costs.saved_bytes)
            else:
                known.append(-behind_bytes)
        return tuple(round(max(0.0, rise - counted)) for rise, counted in zip(rises, known, strict=True))

    def _allocated_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.allocated_bytes()

    def _fastest_s(self, stage: int, kind: str) -> float:
        return min(self._backend.seconds(self._marks[stage, kind]), default=0.0)
