"""Keep the state of an optimizer in host memory: the call, its handle, its counters, and the hooks on the optimizer."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.activations.stats import Stats
from offload.base.attributes import with_attribute
from offload.base.checks import check_type, format_bytes, parse_bytes, warn_caller
from offload.base.layer_events import Handle
from offload.base.tensors import check_values
from offload.base.torch_private import in_backward, interpreted
from offload.device.cuda import CaptureError
from offload.device.select import get_backend
from offload.host.page_locked import HostMemoryError
from offload.optimizer.chunks import NUM_SLOTS, ChunkStepper
from offload.optimizer.early import BackwardSteps
from offload.optimizer.forward import ForwardSteps
from offload.optimizer.proof import check_dense, prove, with_groups, without_parameters
from offload.optimizer.state import holder_of, holders_of, local, spread

CHUNK_BYTES = 112 << 20  # of state: AdamW's for 14 Mi parameters in float32, a quarter of a matrix of 4,096 × 14,336
MIN_CHUNKS = 16  # in which the state is streamed, if it is less than so many times the size of a chunk

_REGISTER = "register_step_pre_hook"

_streamed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@dataclass(frozen=True)
class OptimizerStats(Stats):
    """The copies of a :class:`~offload.StreamedOptimizer` since it was made, and the memory it holds.

    ``after - before`` has the copies between two moments, and the memory that is held ``after``.
    """

    _held = ("host_bytes", "resident_bytes", "slot_bytes")
    steps: int = 0  #: Steps of the optimizer.
    chunks: int = 0  #: Chunks that were stepped.
    backward_chunks: int = 0
    """Chunks that were stepped beside backward; the others were stepped in ``optimizer.step()``."""
    forward_parameters: int = 0
    """Parameters, in all steps, for which ``optimizer.step()`` did not wait, as what reads them does."""
    loaded_bytes: int = 0
    """State copied from the host to the device, and weights and gradients that are on the host, where needed."""
    written_bytes: int = 0
    """State copied from the device to the host, weights that are on the host, and a gradient that is set aside."""
    host_bytes: int = 0  #: Pinned host memory of the state, and of a gradient that is set aside.
    resident_bytes: int = 0  #: Device memory of the state that is not streamed.
    slot_bytes: int = 0  #: Device memory of the slots that chunks are loaded into.


class StreamedOptimizer(Handle):
    """An optimizer whose state is streamed, from :func:`stream_optimizer` to :meth:`remove` or the end of ``with``."""

    def __init__(self, stepper: ChunkStepper, early: BackwardSteps | None, forward: ForwardSteps | None) -> None:
        self._stepper: ChunkStepper | None = stepper
        self._early = early
        self._forward = forward
        self._join = forward.join if forward is not None else lambda: None  # lets compute wait for steps beside it
        self._counters = stepper.counters
        self._name = type(stepper.optimizer).__name__
        optimizer = stepper.optimizer
        self._loading: dict[Any, Any] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(interpreted(self._before_step)),
            optimizer.register_state_dict_pre_hook(lambda _: self._in_use.take_over()),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        vars(optimizer)[_REGISTER] = partial(_register_before, weakref.ref(optimizer), self._hooks[0])
        optimizer.state = stepper.store.shown
        _streamed.add(optimizer)

    @property
    def _in_use(self) -> ChunkStepper:
        self.check_in_use()
        return cast("ChunkStepper", self._stepper)

    def no_step(self) -> AbstractContextManager[None]:
        """Inside the block, backward adds to ``p.grad`` and steps nothing, for all microbatches but the last."""
        return nullcontext() if self._early is None else with_attribute(self._early, "enabled", value=False)

    def synchronize(self) -> None:
        """Block until the copies to the host are over, and with them every step.

        ``state_dict()`` and every look into ``optimizer.state`` do this by themselves. Call it before you read a state
        tensor that you have kept from an earlier look.
        """
        self._join()
        if self._stepper is not None:
            self._stepper.settle()

    @property
    def state(self) -> Literal["following", "removed"]:
        """Whether the state is streamed, or the handle was removed."""
        return "removed" if self._stepper is None else "following"

    def stats(self) -> OptimizerStats:
        """The counters so far, a frozen :class:`~offload.OptimizerStats`."""
        return OptimizerStats(**self._counters)

    def remove(self, *, on_device: bool = True) -> None:
        """Stop streaming, and move the state to the device. A second call does nothing.

        State of parameters whose weights are streamed moves to ordinary memory of the host instead. State in
        ``state_dtype`` gets the dtype of its parameter, as ``load_state_dict`` of an optimizer does it. With
        ``on_device=False`` the state remains on the host, as it is: for what does not fit on the device, and for an
        optimizer that steps no more. Where the device or the host has too little memory, as after an error that it had
        none, the state remains there too, and a warning says so. Parameters that backward has stepped have no gradient
        then, so that ``optimizer.step()`` does not step them again. A warning tells if only some have made their step.
        """
        stepper = self._stepper
        if stepper is None:
            return
        if self._early is not None and self._early.runs and in_backward():
            raise RuntimeError(
                "the handle must be removed outside of backward with in_backward=True, but a backward runs that has "
                "stepped some parameters; call remove() once backward() has returned."
            )
        if self._forward is not None:
            self._forward.close()
        state = defaultdict(dict, dict(stepper.store.shown.items()))  # a look into it waits for the copies
        if (optimizer := stepper.reference()) is not None:  # else it has gone with its state
            if on_device:
                try:
                    with torch.inference_mode(False), torch.no_grad():  # the program may continue to train
                        state = stepper.store.moved_back()
                except (torch.OutOfMemoryError, HostMemoryError) as error:
                    # Not raised: on the way out of a block, it would hide the block's own error.
                    warn_caller(
                        f"the optimizer's state remains in host memory, as there is no room to move it ({error}). "
                        "Free some, then optimizer.load_state_dict(optimizer.state_dict()) moves it."
                    )
            optimizer.state = state
            vars(optimizer).pop(_REGISTER, None)
            _streamed.discard(optimizer)
        for hook in self._hooks:
            hook.remove()
        if self._early is not None:
            self._early.close()
        self._stepper = None
        if stepper.torn:  # not raised, as above, but the next handle would not know
            warn_caller(stepper.torn_message)

    def __repr__(self) -> str:
        host, slots = (format_bytes(self._counters[name]) for name in ("host_bytes", "slot_bytes"))
        state = "removed" if self._stepper is None else f"{slots} in slots on the device"
        return f"StreamedOptimizer({self._name}, {host} on the host, {state})"

    # Hooks on the optimizer.

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Step all chunks; what PyTorch calls then is the step of an optimizer without parameters."""
        stepper = self._in_use
        self._join()
        stepper.take_over()
        if stepper.backend.capturing:
            raise CaptureError(
                "optimizer.step() must run outside of a CUDA graph while its state is streamed, but it is being "
                "captured; capture forward and backward alone."
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            kwargs = {**kwargs, "closure": lambda: loss}
        for _, parameter in with_groups(optimizer):  # before any has made the step
            check_dense(parameter)
        stepper.torn = "optimizer.step() was cut off"
        done = set() if self._early is None else self._early.finish()
        left = [(n, p) for n, p in with_groups(optimizer) if p.grad is not None and p not in done]
        with torch.no_grad():
            (self._forward or stepper).step(left)
        if any(stepper.store.of(parameter).on_host for _, parameter in left):
            stepper.settle()  # the program may read or change the weights, and the next forward loads them
        stepper.finish()
        stepper.torn = ""
        return (without_parameters(optimizer),), kwargs

    def _after_state_dict(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        """Counters on the device are copied to the host, as all else in the state; sharded state is shown as such."""
        parameters = [parameter for _, parameter in with_groups(optimizer)]
        state = {}
        for number, entry in found["state"].items():
            state[number] = entry
            if isinstance(entry, dict):
                state[number] = {
                    key: spread(value if value.numel() > 1 else value.cpu(), parameters[number])
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in entry.items()
                }
        return {**found, "state": state}

    def _before_load(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """Keep all tensors but counters from PyTorch, which would copy them to the device and round them."""
        stepper = self._in_use
        if stepper.torn:
            stepper.last_copy = None  # it may have failed, which the program knows
            stepper.backend.synchronize()  # an interrupt may have left copies that no event is known of
        else:
            stepper.settle()
        small = dict(given["state"])
        saved = [number for group in given["param_groups"] for number in group["params"]]
        self._loading = {}
        for number, (_, parameter) in zip(saved, with_groups(optimizer), strict=False):  # PyTorch raises if they differ
            entry = small.get(number)
            if isinstance(entry, dict):
                large = {key: one for key, one in entry.items() if isinstance(one, torch.Tensor) and one.ndim}
                small[number] = {key: value for key, value in entry.items() if key not in large}
                self._loading[parameter] = large
        return {**given, "state": small}

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        stepper = self._in_use
        loading, self._loading = self._loading, {}
        large = {one: {**optimizer.state.get(one, {}), **values} for one, values in loading.items() if values}
        states = {**optimizer.state, **large}
        stepper.store.shown.clear()
        stepper.store.adopt(states)
        stepper.forget()
        if self._early is not None:
            self._early.forget()
        optimizer.state = stepper.store.shown


def _register_before(
    optimizer: weakref.ref[torch.optim.Optimizer], ours: RemovableHandle, hook: Callable[..., Any]
) -> RemovableHandle:
    """Call the program's hook before ours, which makes the step: it may clip gradients."""
    this = optimizer()
    found: RemovableHandle = getattr(type(this), _REGISTER)(this, hook)
    if (hooks := ours.hooks_dict_ref()) is not None:
        hooks.move_to_end(ours.id)
    return found


def stream_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    chunk_bytes: int | str = CHUNK_BYTES,
    max_host_bytes: int | str | None = None,
    resident_bytes: int | str = 0,
    state_dtype: torch.dtype | None = None,
    master_weights: bool = False,
    in_backward: bool = False,
    consume_gradients: bool = False,
    overlap_forward: bool = False,
) -> StreamedOptimizer:
    """Keep the state of ``optimizer`` in pinned host memory, and step the optimizer on the device in chunks.

    The training loop does not change: ``step()``, ``zero_grad()``, groups, schedulers, ``state_dict()``, closures and
    ``GradScaler`` work as before, and parameters get the same bits. ``step()`` loads one chunk of state, steps another
    by the optimizer's own code, and copies a third back, all at the same time::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        with offload.stream_optimizer(optimizer):
            for batch in batches:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    Args:
        optimizer: Any optimizer that steps each parameter by itself, which is tried on small parameters. Its parameters
            are on one device. Of parameters that ``fully_shard`` has sharded, each rank has the state of its own part.
            Parameters that :func:`stream_weights` holds on the host are stepped on the device that their layers compute
            on: with ``in_backward`` right after their layer's backward, and their gradients never go to the host.
        chunk_bytes: State in one chunk, and the size of each of six slots on the device: bytes, or a text such as
            ``"112MiB"``; a sixteenth of all streamed state where that is less. Optimizers that are not elementwise,
            such as Adafactor, are stepped parameter by parameter; their slots have the size of the largest one's state.
        max_host_bytes: The most pinned memory that the device's pool may have; no limit by default.
        resident_bytes: The most state that remains on the device, of whole parameters: the optimizer's first one, whose
            copies come at the end of backward and cannot be hidden, and others spread over the model.
        state_dtype: ``torch.float32`` steps parameters of 16 bits in float32: parameters and gradients of a chunk are
            converted, and the new parameters are rounded back. The state is float32 then. Load a checkpoint after this
            call: before it, PyTorch rounds the state. ``None`` leaves the state as the optimizer makes it, which is in
            the parameter's dtype in PyTorch.
        master_weights: Step float32 weights, of which bfloat16 parameters are the nearest numbers. The state has the
            remaining 16 bits of each. Needs ``state_dtype=torch.float32``.
        in_backward: Step each parameter during backward, as soon as its gradient is complete; ``optimizer.step()`` then
            steps what is left. Gradients must not be clipped or scaled between backward and the step, which raises an
            error. Run all microbatches of a step but the last in :meth:`StreamedOptimizer.no_step`.
        consume_gradients: Free each gradient after its step in backward. What reads ``p.grad`` then raises an error.
            That of a large head waits on the host, as its step takes longer than the next layer. That of parameters
            that :func:`stream_weights` holds is freed in any case, and so are gradients if ``fully_shard`` has sharded
            parameters: PyTorch does not tell when it clips those. Of freed gradients ``zero_grad(set_to_none=False)``
            leaves no zeros, so that a parameter without a new gradient is not stepped.
        overlap_forward: Return from ``optimizer.step()`` when its chunks are queued. The next forward begins while they
            are stepped, and what reads a parameter first, layer or program, waits for the parameter. For gradients that
            are clipped or scaled, and so cannot be stepped in backward. Takes device memory: gradients
            are freed as their parameters are read. With compiled code, ``step()`` waits as without the option. With
            ``in_backward``, a quarter of the state is stepped so from the second step on, and backward steps the rest:
            short steps have the link for their whole time.

    Returns:
        A handle with ``stats()`` and ``remove()``, which is also a context manager.

    Raises:
        TypeError: ``optimizer`` does not step each parameter by itself, or its state is not made of plain tensors.
        ValueError: ``optimizer`` is streamed already or differentiable, or its parameters are on several devices.
        HostMemoryError: The host has too little memory, or ``max_host_bytes`` is too small; nothing has been changed.
    """
    check_type("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    chunk_size, resident = parse_bytes(chunk_bytes, "chunk_bytes"), parse_bytes(resident_bytes, "resident_bytes")
    if chunk_size < 1:
        raise ValueError(f"chunk_bytes must be at least 1 byte, got {chunk_size}; leave it out for 112 MiB.")
    check_float32(state_dtype, master_weights=master_weights)
    if consume_gradients and not in_backward:
        raise ValueError("consume_gradients must be False without in_backward=True, got True; pass both.")
    device = _step_device(optimizer)
    parameters = [parameter for _, parameter in with_groups(optimizer)]
    for holder in holders_of(parameters) if in_backward else ():
        holder.check_steps(parameters)
    if overlap_forward:
        check_overlap(parameters)
    stepper = ChunkStepper(
        optimizer,
        get_backend(device),
        chunk_size,
        proof=prove(optimizer, state_dtype, device),
        state_dtype=state_dtype,
        master_weights=master_weights,
        max_host_bytes=None if max_host_bytes is None else parse_bytes(max_host_bytes, "max_host_bytes"),
        resident_bytes=resident,
    )
    sharded = any(hasattr(parameter, "to_local") for parameter in parameters)
    if sharded and not stepper.store.proof.elementwise:
        raise TypeError(
            f"optimizer must be elementwise to step sharded parameters (DTensor), got {type(optimizer).__name__}, "
            "which needs whole parameters; leave the optimizer as it is."
        )
    with torch.no_grad():
        stepper.store.reserve(
            [parameter for parameter in parameters if parameter.requires_grad or parameter in optimizer.state],
            optimizer.state,
        )
        stepper.store.adopt(optimizer.state)
    if stepper.counters["host_bytes"]:  # else slots for a small model would hold more than its state
        stepper.chunk_bytes = max(1, min(stepper.chunk_bytes, stepper.counters["host_bytes"] // MIN_CHUNKS))
    consumes = consume_gradients or sharded
    if consumes and in_backward:
        stepper.store.reserve_aside(parameters, NUM_SLOTS * chunk_size)
    early = BackwardSteps(stepper, consume=consumes, leave=overlap_forward) if in_backward else None
    return StreamedOptimizer(stepper, early, ForwardSteps(stepper) if overlap_forward else None)


def check_float32(state_dtype: torch.dtype | None, *, master_weights: bool) -> None:
    """Raise unless these arguments can be given together."""
    if state_dtype not in (None, torch.float32):
        raise ValueError(f"state_dtype must be torch.float32 or None, got {state_dtype!r}")
    if master_weights and state_dtype is None:
        raise ValueError("master_weights must be False without state_dtype=torch.float32, got True; pass both.")


def check_overlap(parameters: Iterable[torch.Tensor]) -> None:
    """Raise unless the step of these parameters can run beside the next forward."""
    strange = next((one for one in parameters if type(one) is not nn.Parameter or holder_of(one) is not None), None)
    if strange is not None:
        raise ValueError(
            "overlap_forward must be False unless each parameter is an nn.Parameter on the device, got a "
            f"{type(strange).__name__} on {strange.device}; leave it out."
        )


def check_can_be_streamed(optimizer: torch.optim.Optimizer) -> None:
    """Raise if no state of the optimizer can be streamed, wherever its parameters are."""
    name = type(optimizer).__name__
    if optimizer in _streamed:
        raise ValueError(f"optimizer must not be streamed yet, but this {name} is; remove() its handle first.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"optimizer must not be differentiable, but this {name} is; build it without the option.")


def _step_device(optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of the parameters, if they can be streamed."""
    check_can_be_streamed(optimizer)
    parameters = [parameter for _, parameter in with_groups(optimizer)]
    # A parameter is stepped where it is, or, if its weights are streamed, where they are streamed to.
    devices = list(dict.fromkeys((holder_of(parameter) or parameter).device for parameter in parameters))
    if len(devices) != 1:
        raise ValueError(
            f"optimizer must have its parameters on one device, got {' and '.join(map(str, devices)) or 'none'}; build "
            "an optimizer for each device, or move the modules outside of the layers whose weights are streamed."
        )
    for parameter in parameters:
        check_values("each parameter of the optimizer", parameter)
        part = local(parameter)
        if part.layout is not torch.strided or torch.empty_like(part, device="meta").stride() != part.stride():
            raise ValueError(
                f"optimizer must have dense parameters, got one of shape {tuple(part.shape)} with gaps in memory or "
                "sparse; make it contiguous."
            )
    return devices[0]


def streams_any_of(parameters: Collection[torch.Tensor]) -> bool:
    """Whether the state of one of these parameters is streamed."""
    return any(parameter in parameters for optimizer in _streamed for _, parameter in with_groups(optimizer))
