"""A trial of a compiled layer: at each level gradients are proven, bytes are counted, and times are taken.

In a trial the layer runs forward and backward on copies of its inputs, apart from the model's graph. All runs draw the
same random numbers, and get the same gradient of the output, so that their gradients are the same bits, unless the
compiler rounds otherwise where it fuses a recomputed operation with others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.what_moves import Rules, offloaded_parts
from offload.base.layer_events import compute_device, is_sharded
from offload.base.tensors import plain_memory, same_bits, tensors_in
from offload.base.torch_private import address_of, has_gradient_hooks, in_checkpoint, tree_leaves
from offload.device.backend import Backend
from offload.measuring.queueing import MOST_DELAY_S
from offload.observe.memory import MemoryPeak
from offload.recompute.compiled_levels import NAMES, CompiledForward, Level
from offload.recompute.costs import RegionProfile
from offload.recompute.layer_inputs import LayerInputs, Place, with_tensors
from offload.recompute.state import LayerState, drawn_again, states_of

TIMES = 2  # so many runs at each level are timed, of which the shortest counts, behind one that compiles
ROUNDED = 0.75
"""Two gradients differ by rounding if the distance, in parts of their length, is below the dtype's step to this power:
3% in bfloat16, 7e-6 in float32. Other random numbers make it 30% and more."""

NEGLIGIBLE = 1e-2
"""Gradients below this part of the longest one are held against that: where the true gradient is zero, as of the bias
of keys, all of it is rounding."""


_SAVES = {
    Level.NOTHING: "its inputs alone", Level.ATTENTION: "attention alone", Level.PRODUCTS: "products and attention",
    Level.ALL: "all",
}  # fmt: skip


class NotCompiledError(Exception):
    """The layer has no levels; the text says why, and ``compiles`` whether the layer may be compiled as a whole."""

    def __init__(self, why: str, *, compiles: bool = True) -> None:
        super().__init__(why)
        self.compiles = compiles


class ToTry(NamedTuple):
    """A layer whose forward is about to begin."""

    layer: nn.Module
    forward: CompiledForward
    given: tuple[Any, Any]  # the forward's arguments, positional and by keyword
    rules: Rules
    backend: Backend
    memory: MemoryPeak  # tells what each level needs


class Levels(NamedTuple):
    """What a layer's trial has found."""

    saved: Mapping[Level, int]  # bytes that each level saves
    needed: Mapping[Level, int]  # the most on the device in its backward, but for gradients of parameters; if counted
    seconds: Mapping[Level, float]  # of each level, if they were timed
    host_s: Mapping[Level, float]  # of the host
    input_bytes: Mapping[Hashable, int]  # of the memory of each input that counts among what is saved
    said: list[str]


class _LevelRun(NamedTuple):
    gradients: list[torch.Tensor | None]
    saved_bytes: int
    needed_bytes: int
    timed: tuple[tuple[Any, Any], float]  # the marks at its begin and end, and the host's seconds
    states: list[torch.Tensor]  # of the generators, after forward and after backward


class _Trial:
    """One layer, and copies of its inputs."""

    def __init__(self, tried: ToTry) -> None:
        layer, forward, given, rules, backend, memory = tried
        inputs = LayerInputs(*given)
        _check_can_be_tried(layer, inputs)
        self._forward, self._rules, self._backend, self._memory = forward, rules, backend, memory
        self._originals, self._placed = inputs.tensors, inputs.placed
        self._leaves = [_copied(one.detach()).requires_grad_(one.requires_grad) for one in inputs.tensors]
        self._wanted = [one for one in (*layer.parameters(), *self._leaves) if one.requires_grad]
        self._gradient_bytes = sum(one.nbytes for one in layer.parameters() if one.requires_grad)
        self._random = states_of((), (backend.device,))
        self._upstream: list[torch.Tensor] = []
        self._buffers = [(one, one.clone()) for one in layer.buffers()]
        self._state = LayerState(layer)

    def input_bytes(self) -> dict[Hashable, int]:
        pairs = zip(self._originals, self._leaves, strict=True)
        return {
            StorageWeakRef(original.untyped_storage()): sum(part.untyped_storage().nbytes() for part in parts)
            for original, leaf in pairs
            if (parts := [*offloaded_parts(leaf.detach(), self._rules)])
        }

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put back what the layer changes in itself; an error if it changes anything."""
        contents = self._state.contents()
        changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._state.as_in(self._state.snapshot()):
            try:
                yield
            finally:
                changed += [pair for pair in self._buffers if not same_bits(*pair)]
                with torch.no_grad():
                    for buffer, before in changed:
                        buffer.copy_(before)
        if changed or self._state.contents() != contents:
            raise NotCompiledError("forward changes its buffers or attributes")
        if not all(map(same_bits, self._originals, self._leaves)):
            raise NotCompiledError("forward writes into an input")

    def check(self) -> None:
        with torch.enable_grad(), drawn_again(self._random):
            self._forward.check(*self._arguments())

    def run(self, level: Level, delay_s: float = 0.0) -> _LevelRun:
        """Run forward and backward at a level, behind a delay of the device that lets the host be ahead."""
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            for one in offloaded_parts(tensor, self._rules):
                saved[address_of(one.untyped_storage())] = one.untyped_storage().nbytes()
            return tensor if tensor.is_leaf else tensor.detach()

        before_bytes = self._memory.now_bytes()
        arguments = self._arguments()
        with torch.enable_grad(), drawn_again(self._random):
            if delay_s and self._backend.device.type != "cpu":
                self._backend.delay(delay_s)
            begin, begin_s = self._backend.mark(), time.perf_counter()
            # What is timed runs as it will without offloading: hooks take the host's time.
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with nullcontext() if delay_s else hooks:
                output = self._forward.at(level, *arguments)
            states = [generator.get_state() for generator in self._random]
            outputs = [one for one in tensors_in(output) if one.requires_grad]
            if not outputs:
                raise NotCompiledError("its output needs no gradient")
            host_s = time.perf_counter() - begin_s
            with torch.autocast(self._backend.device.type, enabled=False), self._memory.apart() as meter:
                # As in a model, nobody else holds the output, nor its gradient once that has been used.
                sums = [
                    (one * gradient).sum() for one, gradient in zip(outputs, self._upstream_of(outputs), strict=True)
                ]
                ones = [torch.ones_like(one) for one in sums]
                del arguments, output, outputs
                begin_s = time.perf_counter()
                found = torch.autograd.grad(sums, self._wanted, ones, allow_unused=True)
                host_s += time.perf_counter() - begin_s
            states += [generator.get_state() for generator in self._random]
        timed = (begin, self._backend.mark()), host_s
        needed_bytes = meter.peak_bytes - before_bytes - self._gradient_bytes
        return _LevelRun(list(found), sum(saved.values()), needed_bytes, timed, states)

    def _arguments(self) -> tuple[Any, Any]:
        # No leaves, which autograd holds in any case, as it does not hold what a layer before has computed.
        args, kwargs = self._placed
        given = [one.clone() if one.requires_grad else one for one in self._leaves]
        return with_tensors(args, given), with_tensors(kwargs, given)

    def _upstream_of(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self._upstream:
            generator = torch.Generator(self._backend.device).manual_seed(0)
            self._upstream = [
                torch.randn(one.shape, dtype=one.dtype, device=one.device, generator=generator) for one in outputs
            ]
        return self._upstream


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also of a tensor that is expanded, as a mask may be."""
    once = tensor
    for side, stride in enumerate(tensor.stride()):
        once = once.narrow(side, 0, 1) if stride == 0 and tensor.shape[side] else once
    return once.clone().expand(tensor.shape)


def try_levels(tried: ToTry, times: int = TIMES) -> Levels:
    """Run a layer at each level, on copies of its inputs; so many ``times`` a run at each level is timed.

    Raises:
        NotCompiledError: The layer does not compile, or no level recomputes what the layer computes.
    """
    said: list[str] = []
    seconds: dict[Level, float] = {}
    host_s: dict[Level, float] = {}
    saved: dict[Level, int] = {}
    needed: dict[Level, int] = {}
    try:
        trial = _Trial(tried)
        with trial.unchanged():
            trial.check()
            expected = trial.run(Level.ALL)
            noisy: bool | None = None  # whether the same level gives other bits each time
            for level in (Level.ALL, Level.NOTHING, Level.PRODUCTS, Level.ATTENTION):
                if level in (Level.PRODUCTS, Level.ATTENTION) and not tried.forward.has(level):
                    continue
                found = trial.run(level)
                apart = _apart(expected, found)
                if apart > 0 and noisy is None:
                    noisy = _apart(expected, trial.run(Level.ALL)) > 0
                rounds = 0 < apart <= 1 and not noisy
                if apart > 1:
                    said.append(f"never saves {_SAVES[level]}, since the gradients are wrong then")
                elif rounds and not tried.forward.asked:
                    said.append(f"never saves {_SAVES[level]}: gradients round otherwise, which compile=True accepts")
                elif rounds:
                    said.append(f"rounds gradients otherwise where it saves {_SAVES[level]}, as its dtypes allow")
                if apart <= 1 and (tried.forward.asked or not rounds):
                    saved[level] = found.saved_bytes
                    runs = [(found.needed_bytes, *found.timed)]
                    del found
                    for _ in range(times):
                        again = trial.run(level, MOST_DELAY_S)
                        runs.append((again.needed_bytes, *again.timed))
                        del again
                    each_bytes, marks, took_s = zip(*runs, strict=True)
                    if tried.memory.counts:
                        needed[level] = min(each_bytes)  # the compiler may try kernels as they run for the first time
                    if times:
                        seconds[level], host_s[level] = min(tried.backend.seconds(marks[1:])), min(took_s[1:])
                elif level is Level.NOTHING:
                    break  # then no other level will do
    except NotCompiledError:
        raise
    except torch.OutOfMemoryError as error:  # all levels, on copies, need more than a layer that is recomputed
        raise NotCompiledError("the device has too little memory to try it") from error
    except Exception as error:  # whatever the compiler or the layer raises
        first = next(filter(None, map(str.strip, str(error).splitlines())), "")
        raise NotCompiledError(f"{type(error).__name__}: {first}", compiles=False) from error
    if Level.NOTHING not in saved or saved[Level.NOTHING] >= saved.get(Level.ALL, 0):
        raise NotCompiledError("; ".join(said) or "its graph saves no more than its inputs")
    return Levels(saved, needed, seconds, host_s, trial.input_bytes(), said)


def costs_of_levels(
    seconds: Mapping[Level, float], saved: Mapping[Level, int], needed: Mapping[Level, int]
) -> tuple[RegionProfile, ...]:
    """A layer's inputs, and what the levels keep of which each saves more than the one before, with what each adds."""
    # What backward needs at a level has been measured, and is not what regions add up to if some are dropped: the
    # compiler fuses what is recomputed, and frees it on the way. The learning microbatch tells the rest, such as
    # gradients, at the lowest level.
    levels = [Level.ALL]
    for level in (Level.PRODUCTS, Level.ATTENTION, Level.NOTHING):
        if level in saved and saved[level] < saved[levels[0]]:
            levels.insert(0, level)
    levels[0] = Level.NOTHING
    all_bytes, lowest = saved[levels[-1]], Level.NOTHING
    need = [needed.get(level, all_bytes) for level in levels]
    first = RegionProfile(NAMES[lowest], saved[lowest], 0.0, recomputable=False, spared_bytes=all_bytes - need[0])
    costs = [first]
    # No level takes longer than one below, whatever the clock says.
    taken = [max(seconds.get(one, 0.0) for one in levels[number:]) for number in range(len(levels))]
    for number, (below, level) in enumerate(pairwise(levels)):
        more, took_s = saved[level] - saved[below], taken[number] - taken[number + 1]
        spared = need[number] - need[number + 1]
        costs.append(RegionProfile(NAMES[level], more, took_s, (0,), only_with=number or None, spared_bytes=spared))
    return tuple(costs)


_HARMLESS = (Place, bool, int, float, str, torch.dtype, torch.device, type(None))


def _check_can_be_tried(layer: nn.Module, inputs: LayerInputs) -> None:
    """Raise where a layer cannot be tried on copies of its inputs."""
    why = None
    if compute_device([layer]) is not None:
        why = "its weights are streamed"
    elif any(map(is_sharded, layer.modules())):
        raise NotCompiledError("its weights are sharded", compiles=False)
    elif in_checkpoint():
        why = "the program checkpoints it"
    elif any(has_gradient_hooks(one, accumulated=False) for one in layer.parameters()):
        why = "a parameter has a hook on its gradient"
    elif any(plain_memory(one) is None for one in inputs.tensors):
        why = "an input is no plain tensor"
    else:
        strange = next((one for one in tree_leaves(inputs.placed) if not isinstance(one, _HARMLESS)), None)
        why = None if strange is None else f"forward may change its argument of type {type(strange).__name__}"
    if why is not None:
        raise NotCompiledError(why)


def _apart(expected: _LevelRun, found: _LevelRun) -> float:
    """How far gradients are from the expected ones: 0 for the same bits, up to 1 for rounding, and more if wrong."""
    if not all(map(torch.equal, expected.states, found.states)):
        return math.inf
    pairs = list(zip(expected.gradients, found.gradients, strict=True))
    if any((one is None) != (other is None) for one, other in pairs):
        return math.inf
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    different = [pair for pair in both if not same_bits(*pair)]
    if not different:
        return 0.0
    longest = max(_length(one) for one, _ in both)
    apart = 0.0
    for one, other in different:
        step = torch.finfo(one.dtype).eps ** ROUNDED
        least = step * max(_length(one), NEGLIGIBLE * longest)
        ratio = _length(one - other) / least if least > 0 else math.inf
        apart = max(apart, ratio if math.isfinite(ratio) else math.inf)
    return max(apart, math.ulp(0.0))


def _length(tensor: torch.Tensor) -> float:
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))
