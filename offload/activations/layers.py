"""Offload the layers of a model whose forward cannot be edited, through module hooks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from offload.activations.context import DEFAULT_MIN_BYTES, OffloadContext
from offload.activations.stats import OffloadStats
from offload.base.compiler import forget_compiled, interpreted
from offload.base.layer_events import LayerHook, check_layers
from offload.host.limits import HostMemory, WhenFull
from offload.schedule.schedule import Schedule
from offload.weights.streamed import streaming_device

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from offload.planning.plan import Plan


class OffloadedLayers:
    """Layers whose activations move; made by :func:`offload_layers`, undone by :meth:`remove`.

    As a context manager it is undone at the end of the block.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext) -> None:
        self._layers = layers
        self._context = context
        self._hooks: list[RemovableHandle] = []
        for number, layer in enumerate(layers):
            boundary = _Boundary(context, number)
            _Checkpoint.wrap(layer, boundary)
            self._hooks += [
                layer.register_forward_pre_hook(_BeginForward(boundary), prepend=True),
                layer.register_forward_hook(_EndForward(boundary), always_call=True),
            ]
        forget_compiled()

    @property
    def schedule(self) -> Schedule | None:
        """What moves when."""
        return self._context.schedule

    def remove(self) -> None:
        """Take the hooks off the layers. Graphs that exist stay valid. A second call does nothing."""
        self._context.abort()  # an interrupt in a layer skips the hook that would have left it
        for layer in self._layers:
            _Checkpoint.unwrap(layer)
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            forget_compiled()

    def stats(self) -> OffloadStats:
        """A frozen snapshot of what has moved so far."""
        return self._context.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        kinds = " and ".join(sorted({type(layer).__name__ for layer in self._layers}))
        state = "" if self._hooks else ", removed"
        return f"OffloadedLayers({kinds} in {self._context!r}{state})"


def offload_layers(
    layers: Iterable[nn.Module],
    num_layers: int = 4,
    *,
    schedule: Schedule | None = None,
    plan: Plan | None = None,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    max_host_bytes: int | str | None = None,
    when_host_full: WhenFull = "keep",
) -> OffloadedLayers:
    """Move activations of the first ``num_layers`` of ``layers`` to the host, without a change to the model.

    Forward hooks enter and leave the offload context around each layer and mark its outputs. The model's
    ``state_dict`` stays as it is, and a copy or pickle of the model is one without offloading::

        with offload_layers(model.model.layers, num_layers=4) as handle:
            model(**batch).loss.backward()
        print(handle.stats())

    Args:
        layers: The layers in the order in which forward calls them: an ``nn.ModuleList``, an ``nn.Sequential``, any
            iterable of modules. A layer may be skipped in a forward, but not called twice.
        num_layers: How many to offload, the first ones; at most ``len(layers) - 1``.
        schedule: A schedule of your own over ``len(layers)`` layers, in place of the default one.
        plan: The result of :func:`offload.plan`, in place of ``num_layers``.
        min_bytes: Storages smaller than this stay on the device; bytes, or a text such as ``"1MiB"``.
        device: The device whose activations move; by default that of the layers' first parameter, or
            where they compute if their weights are streamed.
        max_host_bytes: The most pinned host memory to use, in bytes or as a text such as ``"40GiB"``; no limit by
            default.
        when_host_full: What happens to activations that find no room on the host: ``"keep"`` them on the device,
            copy them to ``"pageable"`` memory, which is slow, or ``"raise"`` a :class:`HostMemoryError`.

    Returns:
        A handle with ``stats()`` and ``remove()``, which is also a context manager.

    Raises:
        TypeError: ``layers`` does not hold modules.
        ValueError: There are no layers, one is listed twice, inside another or offloaded already, or the schedule
            does not fit their number.
    """
    modules = check_layers(layers, _BeginForward, "offloaded", "cannot be offloaded")
    if plan is not None:
        if schedule is not None:
            raise ValueError("schedule and plan exclude each other; give one.")
        schedule = plan.schedule
    if schedule is None:
        schedule = Schedule.default(num_layers, len(modules))
    if schedule.model_layers != len(modules):
        raise ValueError(f"the schedule must be over {len(modules)} layers, got one over {schedule.model_layers}")
    device = streaming_device(modules) if device is None else device
    if device is None:
        parameters = itertools.chain.from_iterable(layer.parameters() for layer in modules)
        device = next((parameter.device for parameter in parameters), None)
    host = HostMemory(max_host_bytes, when_host_full)
    context = OffloadContext(schedule, len(modules), min_bytes=min_bytes, device=device, host=host)
    return OffloadedLayers(modules, context)


class _Boundary:
    """Where one layer's forward begins and ends."""

    def __init__(self, context: OffloadContext, layer: int) -> None:
        self.context = context
        self.layer = layer
        self.handled_error: BaseException | None = None
        self.around_checkpoint = False

    def begin(self) -> None:
        """The forward begins; one that an interrupt has cut off, of this layer or another, is given up."""
        if self.around_checkpoint:
            return
        self.handled_error = sys.exception()
        if not self.context.has_nothing_to_do():
            self.context.abort()
        self.context.enter(self.layer)

    def end(self, output: object) -> None:
        """The forward has returned or raised."""
        if self.around_checkpoint:
            return
        failed = sys.exception() is not self.handled_error
        self.context.exit(failed=failed)
        if not failed:
            self.context.sync(output)


class _Checkpoint:
    """A Hugging Face layer's checkpoint function, with the layer's boundary around it.

    Where the layer checkpoints its whole call, module hooks run inside the checkpoint, after the layer's
    inputs have been saved. Here the boundary comes first, so that the inputs move.
    """

    ATTRIBUTE = "_gradient_checkpointing_func"

    def __init__(self, function: Callable[..., object], boundary: _Boundary) -> None:
        self.function = function
        self.boundary = boundary

    def __call__(self, *args: object, **kwargs: object) -> object:
        boundary = self.boundary
        if boundary.context.inside:
            return self.function(*args, **kwargs)
        boundary.begin()
        boundary.around_checkpoint = True
        output = None
        try:
            output = self.function(*args, **kwargs)
        finally:
            boundary.around_checkpoint = False
            boundary.end(output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return (_same, (self.function,))

    @classmethod
    def wrap(cls, module: nn.Module, boundary: _Boundary) -> None:
        """Put the boundary around the layer's checkpoint function, if it has one now."""
        function = getattr(module, cls.ATTRIBUTE, None)
        if function is not None and not isinstance(function, cls):
            setattr(module, cls.ATTRIBUTE, cls(function, boundary))

    @classmethod
    def unwrap(cls, module: nn.Module) -> None:
        """Undo :meth:`wrap`."""
        function = getattr(module, cls.ATTRIBUTE, None)
        if isinstance(function, cls):
            setattr(module, cls.ATTRIBUTE, function.function)


def _same(function: Callable[..., object]) -> Callable[..., object]:
    return function


class _BoundaryHook(LayerHook):
    def __init__(self, boundary: _Boundary) -> None:
        self.boundary = boundary


class _BeginForward(_BoundaryHook):
    @interpreted
    def __call__(self, module: nn.Module, args: Any) -> None:
        _Checkpoint.wrap(module, self.boundary)
        self.boundary.begin()


class _EndForward(_BoundaryHook):
    @interpreted
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.boundary.end(output)
