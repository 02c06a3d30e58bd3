"""What compiled code allocates on the CPU, where no dispatch mode sees it: PyTorch's profiler notes it.

The profiler runs while compiled code does, in forward and in backward, and only where a mode counts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from offload.base.tensors import plain_address, plain_memory, tensors_in
from offload.base.torch_private import (
    begin_profile,
    dispatch_modes,
    end_profile,
    pop_hooks,
    profile_options,
    profiles,
    profiling,
    push_hooks,
    top_hooks,
)
from offload.observe.memory import CpuAllocations

_logger = logging.getLogger(__name__)


def count_compiled(module: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    """Run a module's compiled code, so that modes that count know what the code allocates, in its backward as well."""
    modes = [mode for mode in dispatch_modes() if isinstance(mode, CpuAllocations)]
    if not modes:
        return run(*args)
    hooks = top_hooks(True)
    pack, unpack = hooks or (_detached, lambda tensor: tensor)
    saved: list[list[Any]] = []

    def pack_later(tensor: torch.Tensor) -> list[Any]:
        saved.append([tensor])
        return saved[-1]

    allocations = _Allocations(modes)
    push_hooks(pack_later, lambda box: unpack(box[0]))
    try:
        allocations.begin()
        output = run(*args)
    finally:
        allocations.end()
        pop_hooks(pack_later)
    there_before = {plain_address(one) for one in (*module.parameters(), *module.buffers(), *tensors_in(args))}
    made = (*tensors_in(output), *(box[0] for box in saved))
    allocations.count(one for one in made if plain_address(one) not in there_before)
    for box in saved:  # while the profiler does not run, which takes buffers in host memory for the device's
        box[0] = pack(box[0])
    saved.clear()
    for node in _nodes_between(args, output):
        node.register_prehook(allocations.begin)
        node.register_hook(allocations.end_backward)
    return output


class _Allocations:
    """What one run of compiled code allocates, for some modes."""

    def __init__(self, modes: list[CpuAllocations]) -> None:
        self._modes = modes
        self._before: list[int] = []  # what each mode had counted when this began; empty where nothing is noted

    def begin(self, _: object = None) -> None:
        self._before = []  # a backward that has failed has not come to its end
        if profiling():
            warn_once()
        if profiles():  # the program's own does, or that of a layer whose backward recomputes this one
            return
        autograd: Any = torch.autograd  # exports these without types
        config = autograd.ProfilerConfig(
            autograd.ProfilerState.CPU, False, True, False, False, False, profile_options()
        )
        begin_profile(config)
        self._before = [mode.live_bytes for mode in self._modes]

    def end(self) -> None:
        if self._before:
            events = (event for thread in end_profile() for event in thread if event.kind() == "memory_alloc")
            most_bytes = max(accumulate((event.cpu_memory_usage() for event in events), initial=0))
            for mode, before_bytes in zip(self._modes, self._before, strict=True):
                mode.note_peak(before_bytes + most_bytes)
            self._before = []

    def end_backward(self, gradients: object, _: object) -> None:
        self.end()
        self.count(tensors_in(gradients))

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        for memory in (memory for one in tensors if (memory := plain_memory(one)) is not None):
            for mode in self._modes:
                mode.count(memory)


@functools.cache
def warn_once() -> None:
    """Say in this process's log that a budget was not watched."""
    _logger.warning(
        "compiled layers may need more than memory_budget on the CPU: what they allocate is not counted while the "
        "program's own profiler runs"
    )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd saves without hooks; an output that held its own node would never be freed."""
    return tensor if tensor.is_leaf else tensor.detach()


def _nodes_between(given: object, output: object) -> list[Any]:
    """The nodes of autograd's graph that made ``output`` from what was ``given``: of one graph, the compiled one."""
    seen: set[Any] = {tensor.grad_fn for tensor in tensors_in(given)}
    left = [tensor.grad_fn for tensor in tensors_in(output)]
    found = []
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
            found += [node] if node.next_functions else []  # a parameter's own lives on from step to step
    return found
