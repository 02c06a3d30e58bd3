"""The drop-in for Transformer Engine's function of the same name, and three verbs for programs without a schedule."""

from __future__ import annotations

from typing import Any, Literal, Protocol, overload

import torch

from offload.activations.activation_set import ActivationSet, OffloadState, OffloadStateError
from offload.activations.context import DEFAULT_MIN_BYTES, LayerOutput, OffloadContext
from offload.base.checks import check_int, check_type, is_int
from offload.device.backend import Stream
from offload.schedule.schedule import Schedule, check_schedule


class SyncFunction(Protocol):
    """Marks a layer's output, and returns it."""

    def __call__(self, output: LayerOutput, /) -> LayerOutput: ...


@overload
def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    *,
    manual_synchronization: Literal[False] = False,
    **options: Any,
) -> tuple[OffloadContext, SyncFunction]: ...
@overload
def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    *,
    manual_synchronization: Literal[True],
    **options: Any,
) -> tuple[OffloadContext, SyncFunction, ManualOffloadSynchronizer]: ...
def get_cpu_offload_context(  # type: ignore[misc]  # options are any here, and known below
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Stream | None = None,
    *,
    schedule: Schedule | None = None,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    max_host_bytes: int | str | None = None,
) -> tuple[Any, ...]:
    """Offload activations in a forward that you write: a context for each layer, and a function for its output.

    The names, defaults and return values are those of Transformer Engine's function of the same name::

        context, sync = get_cpu_offload_context(enabled=True, num_layers=4, model_layers=len(layers))
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)

    Args:
        enabled: If false, the context does nothing, with stats of zeros, the function returns its argument, and the
            calls of the synchronizer do nothing.
        num_layers: How many layers to offload, the first ones; at most ``model_layers - 1``. Not used with a
            schedule of your own or with manual synchronization.
        model_layers: Number of layers, that is of times the context is entered per microbatch.
        offload_activations: Must be true.
        offload_weights: Must be false; see :func:`offload.stream_weights` for weights.
        double_buffering: Accepted for compatibility; reloads always overlap with compute.
        manual_synchronization: Return a :class:`ManualOffloadSynchronizer` too, and move only what it is told to.
        retain_pinned_cpu_buffers: Accepted for compatibility; host buffers are always kept for the next step.
        offload_stream: Accepted for compatibility; copies run on the device's two copy streams, one per direction.
        schedule: A schedule of your own, in place of the default one.
        min_bytes: Storages smaller than this are kept on the device; bytes, or a text such as ``"1MiB"``.
        device: The device whose activations move; the current accelerator by default, and the CPU where there is none.
        max_host_bytes: The most pinned host memory to use, such as ``"40GiB"``; no limit by default. Tensors that do
            not fit are kept on the device, with one warning.

    Returns:
        ``(context, sync)``, and with manual synchronization ``(context, sync, synchronizer)``.
    """
    check_type("enabled", enabled, bool, "True or False")
    if not enabled:
        context = OffloadContext(Schedule(1), model_layers, device="cpu", enabled=False)
        return (context, context.sync, ManualOffloadSynchronizer(context))[: 2 + manual_synchronization]
    if offload_weights:
        raise ValueError(
            "offload_weights must be False, got True; weights are streamed by offload.stream_weights(layers, device), "
            "which works together with this function."
        )
    if not offload_activations:
        raise ValueError("offload_activations must be True if enabled, got False; pass enabled=False to turn it off.")
    if schedule is not None:
        check_schedule(schedule)
    if manual_synchronization:
        if schedule is not None:
            raise ValueError("manual_synchronization=True takes no schedule; choose one.")
        check_int("model_layers", model_layers, least=1)
    elif schedule is None:
        if num_layers is None:
            raise ValueError("num_layers must be the number of layers to offload, got None")
        schedule = Schedule.default(num_layers, model_layers)
    elif model_layers not in (1, schedule.model_layers):
        raise ValueError(f"model_layers must be the schedule's, {schedule.model_layers}, got {model_layers}")
    context = OffloadContext(
        schedule,
        model_layers if schedule is None else schedule.model_layers,
        min_bytes=min_bytes,
        device=device,
        max_host_bytes=max_host_bytes,
    )
    return (context, context.sync, ManualOffloadSynchronizer(context))[: 2 + manual_synchronization]


class ManualOffloadSynchronizer:
    """Says when each layer's activation set moves; a layer for which nothing is called is kept on the device.

    Made by ``get_cpu_offload_context(manual_synchronization=True)``. Per layer and microbatch the calls come in the
    order of the methods below. Backward needs no call: it waits for each reload by itself, and reloads a layer
    that was released and not reloaded when it gets there, which is counted in ``stats().late_reloads``.

    Each call speaks of one layer, ``layer_id``, in one ``microbatch``, as :attr:`microbatch` counted. Without it,
    :meth:`start_offload_layer` means the microbatch whose forward began last, and the two others the oldest one in
    which the layer's state allows the call. Under ``torch.no_grad()`` no microbatch begins and the calls do nothing. A
    call that the state does not allow raises an :class:`OffloadStateError`, which says what to call instead.
    """

    def __init__(self, context: OffloadContext) -> None:
        self._context = context

    @property
    def microbatch(self) -> int:
        """Number of the microbatch whose forward began last, counted from 0; -1 before the first."""
        return self._context.microbatch

    def start_offload_layer(self, layer_id: int, *, microbatch: int | None = None) -> None:
        """Queue the copies to the host of what the layer has saved, and in its forward of what it will save."""
        moving = self._find("start_offload_layer", layer_id, microbatch)
        if moving is None:
            return
        if moving.gone:
            raise OffloadStateError(
                f"start_offload_layer({layer_id}): layer {layer_id} must be RESIDENT, but its backward is over; "
                "call it between the layer's forward and its backward."
            )
        moving.start_offload()

    def release_activation_forward_gpu_memory(self, layer_id: int, *, microbatch: int | None = None) -> None:
        """Let the device memory of a started layer go; compute waits, on the device, until the copies are done."""
        call = "release_activation_forward_gpu_memory"
        moving = self._find(call, layer_id, microbatch, OffloadState.OFFLOADING)
        if moving is not None:
            moving.release()

    def start_reload_layer(self, layer_id: int, *, microbatch: int | None = None) -> None:
        """Queue the copies of a released layer back to the device, in the order in which backward asks for them."""
        moving = self._find("start_reload_layer", layer_id, microbatch, OffloadState.OFFLOADED)
        if moving is not None:
            moving.start_reload()

    def __repr__(self) -> str:
        return f"ManualOffloadSynchronizer({self._context.model_layers} layers, microbatch={self.microbatch})"

    def _find(
        self, call: str, layer: int, microbatch: int | None, needed: OffloadState | None = None
    ) -> ActivationSet | None:
        """The activation set that a call means; ``None`` if there is nothing to move."""
        if not self._context.enabled:
            return None
        layers, newest = self._context.model_layers, self.microbatch
        if not is_int(layer, 0, layers - 1):
            raise ValueError(f"layer_id must be an int from 0 to model_layers - 1 = {layers - 1}, got {layer!r}")
        if microbatch is not None and not is_int(microbatch, 0, newest):
            raise ValueError(
                f"microbatch must be from 0 to {newest}, that of the last forward, got {microbatch!r}; note "
                "synchronizer.microbatch when a forward has run"
            )
        sets = self._context.sets_of(layer)
        if microbatch is None and needed is not None:
            for moving in sets.values():
                if moving.state is needed and not moving.gone:
                    return moving
        found = sets.get(newest if microbatch is None else microbatch)
        if self._context.skipped and (found is None or microbatch is None or microbatch == newest):
            return None  # The forward that the caller speaks of ran without gradients.
        if found is None and microbatch in (None, newest):
            raise OffloadStateError(
                f"{call}({layer}): layer {layer} must have run forward, but it has not run in microbatch {newest}; "
                "call it inside the layer's forward or after it."
            )
        return found
