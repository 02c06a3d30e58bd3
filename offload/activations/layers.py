"""Offload the layers of a model whose forward cannot be edited, through module hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Self

import torch
from torch import nn

from offload.activations.context import DEFAULT_MIN_BYTES, OffloadContext
from offload.activations.stats import OffloadStats, total
from offload.activations.what_moves import exclude_parameters
from offload.base.checks import check_int
from offload.base.given_layers import check_layers
from offload.base.layer_events import Attachment, Handle, LayerCall, LayerListener, Turn, compute_device
from offload.host.limits import HostMemory, WhenFull
from offload.recompute.treatments import LayerTreatments, Treatment, join, parse_treatments
from offload.schedule.schedule import HasSchedule, Schedule, check_schedule, schedule_of


class OffloadedLayers(Handle):
    """Layers whose activations move; made by :func:`offload_layers`, undone by :meth:`remove`.

    As a context manager it is undone at the end of the block.
    """

    def __init__(self, layers: list[nn.Module], context: OffloadContext) -> None:
        self._kinds = " and ".join(sorted({type(layer).__name__ for layer in layers}))
        self._context = context
        exclude_parameters(layers)
        listeners = [_OffloadedLayer(context, number) for number in range(len(layers))]
        self._attachment = Attachment(layers, listeners, self)

    @property
    def schedule(self) -> Schedule | None:
        """What moves when; ``None`` for layers on several devices, which have one each."""
        return self._context.schedule

    def remove(self) -> None:
        """Take the hooks off the layers. Graphs that exist stay valid. A second call does nothing."""
        self._context.abort()  # an interrupt in a layer has kept it from leaving the context
        self._attachment.remove()

    def stats(self) -> OffloadStats:
        """A frozen snapshot of what has moved so far."""
        return self._context.stats()

    def regions(self, layer: int = 0) -> dict[str, str]:
        """What happens to the regions of a layer: treatments by the regions' names, once it has run forward."""
        treatments = self._context.treatments[layer] if self._context.treatments else None
        return {} if treatments is None else treatments.by_name()

    def __enter__(self) -> Self:
        if not self._attachment:
            raise RuntimeError("the handle must be in use, but it was removed; call offload_layers again.")
        return self

    def __repr__(self) -> str:
        state = "" if self._attachment else ", removed"
        return f"OffloadedLayers({self._kinds} in {self._context!r}{state})"


budgeted: Callable[..., OffloadedLayers] = OffloadedLayers
"""Makes what a memory budget asks for: set by :mod:`offload.planning.budget`, which stands on all of this."""

free: Callable[..., OffloadedLayers] = OffloadedLayers
"""Makes what ``num_layers="auto"`` asks for; likewise."""


def offload_layers(
    layers: Iterable[nn.Module],
    num_layers: int | Literal["auto"] = 4,
    *,
    schedule: Schedule | None = None,
    plan: HasSchedule | None = None,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    max_host_bytes: int | str | None = None,
    when_host_full: WhenFull = "keep",
    treatments: Mapping[str, Treatment | str] | None = None,
    layers_per_input: int = 1,
    memory_budget: int | str | None = None,
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
        num_layers: How many to offload, the first ones; at most ``len(layers) - 1``. Of layers on several devices, such
            as ``device_map="auto"`` leaves them, the first ones of each device, in proportion; all but one at most.
            Or ``"auto"``, as many as make the step no longer: the first two microbatches run with everything
            recomputed and are measured, and what is found is the handle's ``plan``.
        schedule: A schedule of your own over ``len(layers)`` layers, on one device, in place of the default one.
        plan: The result of :func:`offload.plan`, with its treatments of regions where it has some, or anything else
            with a ``schedule``; in place of ``num_layers``.
        min_bytes: Storages smaller than this stay on the device; bytes, or a text such as ``"1MiB"``.
        device: The device whose activations move; by default each that the layers' parameters are on, or where they
            compute if their weights are streamed.
        max_host_bytes: The most pinned host memory to use for a device, in bytes or as a text such as ``"40GiB"``; no
            limit by default.
        when_host_full: What happens to activations that find no room on the host: ``"keep"`` them on the device,
            copy them to ``"pageable"`` memory, which is slow, or ``"raise"`` a :class:`HostMemoryError`.
        treatments: What happens to the regions of each layer: patterns of their names (a module, and the operation that
            it runs, such as ``"mlp.up_proj: mm"``; or the operation alone), each with ``"keep"``, ``"offload"`` or
            ``"recompute"``. The first pattern that matches decides; what none matches is kept. What is offloaded
            travels in the first ``num_layers``, which may be 0, and stays in the others. What is recomputed is let go,
            and the recorded operations that lead to it run once more in backward, those alone. In a layer's first
            forward they run at once, and what does not come out bit by bit the same is kept.
        layers_per_input: With treatments: so many layers in a row hold one input, that of the first. The inputs of the
            others are computed again from it when the last one's backward begins: one more forward of all but the last,
            of what is not held there, and these inputs are on the device until their layers' backward is over. Where
            something else happens to a tensor between two layers, or the weights of the first are not there any more
            (streamed, sharded), the input is held or travels.
        memory_budget: In place of all these: device memory for what a step adds to weights and optimizer state, in
            bytes or as a text; or ``"auto"``, which is what the device has left. The first two microbatches run with
            everything recomputed and are measured; the next follow a plan, which is the handle's ``plan``.
            ``max_host_bytes`` is a capacity of it.

    Returns:
        A handle with ``stats()`` and ``remove()``, which is also a context manager.

    Raises:
        TypeError: ``layers`` does not hold modules, or an argument is of another type; the message says which, and what
            to write.
        ValueError: There are no layers, one is listed twice, inside another or offloaded already, or the schedule
            does not fit their number.
    """
    modules = check_layers(layers, _OffloadedLayer, "offloaded", "cannot be offloaded")
    if schedule is not None:
        check_schedule(schedule)
    if memory_budget is not None and (schedule, plan, treatments) != (None, None, None):
        raise ValueError("memory_budget excludes schedule, plan and treatments, which it decides; give it alone.")
    if plan is not None:
        for name, value in (("schedule", schedule), ("treatments", treatments)):
            if value is not None:
                raise ValueError(f"{name} and plan exclude each other; give one.")
        schedule = schedule_of("plan", plan, "what offload.plan returns, or anything else with a Schedule")
    check_int("layers_per_input", layers_per_input, least=1)
    if layers_per_input > 1 and treatments is None:
        raise ValueError(
            f"layers_per_input must be 1 without treatments, got {layers_per_input}; say what happens to the layers' "
            'regions, such as treatments={"*": "recompute"}, or give memory_budget.'
        )
    measured = memory_budget is not None or (num_layers == "auto" and schedule is None)
    if num_layers == "auto" and treatments is not None:
        raise ValueError('num_layers="auto" offloads whole layers, so treatments need a number; or give memory_budget.')
    places = _places(modules)
    if device is None and len(places) > 1:
        if schedule is not None or memory_budget is not None:
            raise ValueError(
                "schedule, plan and memory_budget are for layers on one device, got layers on "
                f"{', '.join(map(str, places))}; call offload_layers once for the layers of each."
            )
        shares = _shares(num_layers, [len(numbers) for numbers in places.values()])
        return _OnSeveralDevices(
            lambda numbers, share, place: offload_layers(
                [modules[number] for number in numbers],
                share,
                min_bytes=min_bytes,
                device=place,
                max_host_bytes=max_host_bytes,
                when_host_full=when_host_full,
                treatments=treatments,
                layers_per_input=layers_per_input,
            ),
            places,
            shares,
        )
    if schedule is None:
        schedule = Schedule.default(0 if measured or num_layers == "auto" else num_layers, len(modules))
    if schedule.model_layers != len(modules):
        raise ValueError(f"the schedule must be over {len(modules)} layers, got one over {schedule.model_layers}")
    device = next(iter(places)) if device is None else device
    host = HostMemory(max_host_bytes, when_host_full)
    if memory_budget is not None:
        return budgeted(modules, memory_budget, min_bytes=min_bytes, device=device, host=host)
    if measured:
        return free(modules, min_bytes=min_bytes, device=device, host=host)
    regions: Sequence[LayerTreatments | None] = () if plan is None else _planned(plan, modules)
    if treatments is not None:
        patterns = parse_treatments(treatments)
        regions = treated = [LayerTreatments(patterns, layer) for layer in modules]
        join(treated, layers_per_input)
    context = OffloadContext(schedule, len(modules), min_bytes=min_bytes, device=device, host=host, treatments=regions)
    return OffloadedLayers(modules, context)


class _OnSeveralDevices(OffloadedLayers):
    """Layers on several devices: those of each have a context of their own, as if there were no others."""

    schedule = None

    def __init__(
        self,
        offload: Callable[[list[int], int | Literal["auto"], torch.device | None], OffloadedLayers],
        places: Mapping[torch.device | None, list[int]],
        shares: Sequence[int | Literal["auto"]],
    ) -> None:
        self._places = places
        with ExitStack() as undo:
            self._parts = [
                undo.enter_context(offload(numbers, share, place))
                for (place, numbers), share in zip(places.items(), shares, strict=True)
            ]
            undo.pop_all()

    def remove(self) -> None:
        for part in self._parts:
            part.remove()

    def stats(self) -> OffloadStats:
        return total([part.stats() for part in self._parts])

    def regions(self, layer: int = 0) -> dict[str, str]:
        found = zip(self._parts, self._places.values(), strict=True)
        return next(part.regions(numbers.index(layer)) for part, numbers in found if layer in numbers)

    def __enter__(self) -> Self:
        for part in self._parts:
            part.__enter__()
        return self

    def __repr__(self) -> str:
        return " and ".join(map(repr, self._parts))


def _places(modules: Sequence[nn.Module]) -> dict[torch.device | None, list[int]]:
    """The devices on which layers compute, with the numbers of the layers.

    Where there are accelerators, a layer that is kept elsewhere is taken to compute where the one before it does.
    """
    found = [compute_device([layer]) or next((each.device for each in layer.parameters()), None) for layer in modules]
    accelerators = [device for device in found if device is not None and device.type not in ("cpu", "meta")]
    device = next(iter(accelerators or filter(None, found)), None)
    places: dict[torch.device | None, list[int]] = {}
    for number, own in enumerate(found):
        device = own if own in accelerators else device
        places.setdefault(device, []).append(number)
    return places


def _shares(num_layers: int | Literal["auto"], sizes: list[int]) -> Sequence[int | Literal["auto"]]:
    """How many layers of each device are offloaded: of each the same part, as far as that goes."""
    if num_layers == "auto":
        return ["auto"] * len(sizes)
    check_int("num_layers", num_layers, least=0)
    most = sum(sizes) - len(sizes)
    if num_layers > most:
        raise ValueError(
            f"num_layers must be at most {most}, all but one on each of {len(sizes)} devices, got {num_layers}; the "
            "backward of each device's last layer comes first there, so offloading it saves little."
        )
    shares = [0] * len(sizes)
    for _ in range(num_layers):
        able = [number for number, size in enumerate(sizes) if shares[number] < size - 1]
        shares[min(able, key=lambda number: (shares[number] + 1) / sizes[number])] += 1
    return shares


def _planned(plan: Any, modules: Sequence[nn.Module]) -> list[LayerTreatments | None]:
    """The treatments of a plan, if it has any: a schedule alone is a plan, too."""
    found = list(getattr(plan, "treatments", ()))
    if not any(found):
        return []
    names = [[region.name for region in layer.regions] for layer in plan.profile.layers]
    return [
        None if one is None else LayerTreatments({"*": Treatment.OFFLOAD}, layer, planned=(one, names[number]))
        for number, (layer, one) in enumerate(zip(modules, found, strict=True))
    ]


class _OffloadedLayer(LayerListener):
    """Enters the context where the layer's forward begins, leaves it where it ends, and marks its output."""

    turn = Turn.ACTIVATIONS

    def __init__(self, context: OffloadContext, number: int) -> None:
        self._context = context
        self._number = number
        self._entered = False

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        self._entered = not self._context.has_nothing_to_do()
        if self._entered:
            self._context.abort()  # a forward that an interrupt has cut off, of this layer or another
            self._context.enter(self._number, inputs)

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        if self._entered:
            self._context.exit(failed=failed)

    def forward_returned(self, call: LayerCall, output: object) -> None:
        if self._entered:
            self._context.sync(output)
