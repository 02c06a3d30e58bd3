"""The drop-in for Transformer Engine's function of the same name: arguments in, context and sync function out."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import torch

from offload.activations.context import DEFAULT_MIN_BYTES, OffloadContext
from offload.activations.manual import ManualOffloadSynchronizer
from offload.base.checks import check_int
from offload.device.backend import Stream
from offload.host.limits import HostMemory, WhenFull
from offload.schedule.schedule import Schedule, SynchronizationDict

Output = TypeVar("Output")


def get_cpu_offload_context(
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
    synchronization_dict: SynchronizationDict | None = None,
    schedule: Schedule | None = None,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    max_host_bytes: int | str | None = None,
    when_host_full: WhenFull = "keep",
) -> tuple[Any, ...]:
    """A context for each layer's forward and a function for its output: activations move to the host meanwhile.

    The names, defaults and return values are those of Transformer Engine's function of the same name::

        context, sync = get_cpu_offload_context(enabled=True, num_layers=4, model_layers=len(layers))
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)

    Args:
        enabled: If false, the context does nothing and the function returns its argument.
        num_layers: How many layers to offload, the first ones; at most ``model_layers - 1``. Not used with a
            schedule of your own or with manual synchronization.
        model_layers: Number of layers, that is of times the context is entered per microbatch.
        offload_activations: Must be true.
        offload_weights: Must be false; see :func:`offload.stream_weights` for weights.
        double_buffering: Accepted for compatibility; reloads always overlap with compute.
        manual_synchronization: Return a :class:`ManualOffloadSynchronizer` too, and move only what it is told to.
        retain_pinned_cpu_buffers: Accepted for compatibility; host buffers are always kept for the next step.
        offload_stream: With manual synchronization, a stream of yours for the copies in both directions.
        synchronization_dict: ``{layer: (offload_fwd, offload_num, reload_fwd, reload_num)}``; see
            :meth:`Schedule.from_synchronization_dict`.
        schedule: A schedule of your own, in place of the default one.
        min_bytes: Storages smaller than this stay on the device; bytes, or a text such as ``"1MiB"``.
        device: The device whose activations move; the current accelerator by default, and the CPU where there is
            none.
        max_host_bytes: The most pinned host memory to use, in bytes or as a text such as ``"40GiB"``; no limit by
            default.
        when_host_full: What happens to activations that find no room on the host: ``"keep"`` them on the device,
            copy them to ``"pageable"`` memory, which is slow, or ``"raise"`` a :class:`HostMemoryError`.

    Returns:
        ``(context, sync)``, and with manual synchronization ``(context, sync, synchronizer)``. The synchronizer is
        ``None`` if not enabled.

    Raises:
        ValueError: Arguments that contradict each other or the number of layers; the message says which.
        TypeError: A number of layers or bytes that is no int.

    Warns:
        UserWarning: ``num_layers`` is ``model_layers - 1``, which leaves nothing to overlap the copies with.
    """
    if not enabled:
        null = (contextlib.nullcontext(), _identity)
        return (*null, None) if manual_synchronization else null
    if offload_weights:
        raise ValueError(
            "offload_weights must be False, got True; weights are streamed by offload.stream_weights(layers, device), "
            "which works together with this function."
        )
    if not offload_activations:
        raise ValueError("offload_activations must be True if enabled, got False; pass enabled=False to turn it off.")
    if offload_stream is not None and not manual_synchronization:
        raise ValueError(
            "offload_stream needs manual_synchronization=True; leave it out to use the device's two copy streams."
        )
    if manual_synchronization:
        if schedule is not None or synchronization_dict is not None:
            raise ValueError("manual_synchronization=True takes no schedule and no synchronization_dict; choose one.")
        check_int("model_layers", model_layers, least=1)
    else:
        schedule = _choose_schedule(num_layers, model_layers, synchronization_dict, schedule)
        model_layers = schedule.model_layers
    context = OffloadContext(
        schedule,
        model_layers,
        min_bytes=min_bytes,
        device=device,
        copy_stream=offload_stream,
        host=HostMemory(max_host_bytes, when_host_full),
    )
    if manual_synchronization:
        return context, context.sync, ManualOffloadSynchronizer(context)
    return context, context.sync


def _choose_schedule(
    num_layers: int | None,
    model_layers: int,
    synchronization_dict: SynchronizationDict | None,
    schedule: Schedule | None,
) -> Schedule:
    if schedule is not None and synchronization_dict is not None:
        raise ValueError("schedule and synchronization_dict exclude each other; give one.")
    if synchronization_dict is not None:
        return Schedule.from_synchronization_dict(synchronization_dict, model_layers)
    if schedule is None:
        if num_layers is None:
            raise ValueError("num_layers must be the number of layers to offload, got None")
        return Schedule.default(num_layers, model_layers)
    if model_layers not in (1, schedule.model_layers):
        raise ValueError(f"model_layers must be the schedule's, {schedule.model_layers}, got {model_layers}")
    return schedule


def _identity(output: Output) -> Output:
    return output
