"""Offload the layers of a model: the one call, its arguments, and the handle that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload.activations.context import DEFAULT_MIN_BYTES, OffloadContext
from offload.activations.module_hooks import HookedLayers, OffloadListener
from offload.activations.stats import OffloadStats
from offload.base.checks import check_int, check_type, parse_budget
from offload.base.find_layers import check_layers
from offload.base.layer_events import Handle, compute_device
from offload.base.torch_private import is_compiled
from offload.measuring.follow_compiled import follow_plan
from offload.measuring.follow_plan import FollowPlan
from offload.measuring.watch_plan import WatchedPlan
from offload.planning.plan import Plan
from offload.recompute.layer_policies import LayerPolicies, alike
from offload.recompute.policies import Policy, parse_policies
from offload.schedule.schedule import Schedule, check_schedule

DEFAULT_NUM_LAYERS = 4


class OffloadedLayers(Handle):
    """Layers whose activations are offloaded; made by :func:`offload_layers`, undone by :meth:`remove`.

    As a context manager it is undone at the end of the block.
    """

    def __init__(self, hooks: HookedLayers, plan: Plan | None = None) -> None:
        self._hooks = hooks
        self._plan = plan

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; ``None`` while layers are measured, and where there is none.

        Once microbatches were timed under it, its seconds are corrected by what they took.
        """
        return self._hooks.corrected_plan if isinstance(self._hooks, FollowPlan) else self._plan

    @property
    def state(self) -> Literal["measuring", "following", "removed"]:
        """Whether the layers are still measured for a plan, follow their plan or schedule, or were removed."""
        if not self._hooks.active:
            return "removed"
        return "measuring" if isinstance(self._hooks, FollowPlan) and self._hooks.measures else "following"

    @property
    def schedule(self) -> Schedule | None:
        """What is released and reloaded at which point."""
        return self._hooks.context.schedule

    def remove(self) -> None:
        """Take the hooks off the layers. Existing graphs remain valid. A second call does nothing."""
        self._hooks.remove()

    def stats(self) -> OffloadStats:
        """The counters so far, a frozen :class:`~offload.OffloadStats`."""
        return self._hooks.context.stats()

    def regions(self, layer: int = 0) -> dict[str, str]:
        """The policy of each region of a layer, by the region's name, once the layer has run forward."""
        policies = self._hooks.policies
        found = policies[layer] if policies else None
        return {} if found is None else found.by_name()

    def __repr__(self) -> str:
        if isinstance(self._hooks, FollowPlan) or self._plan is not None:  # of which a schedule is a part
            parts = [self._hooks.names, *([repr(self.plan)] if self.plan else [])]
        else:
            parts = [f"{self._hooks.names} in {self._hooks.context!r}"]
        parts += [self.state] * (self.state != "following")
        return f"OffloadedLayers({', '.join(parts)})"


def offload_layers(
    layers: Iterable[nn.Module],
    num_layers: int | None = None,
    *,
    schedule: Schedule | None = None,
    plan: Plan | None = None,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    max_host_bytes: int | str | None = None,
    policies: Mapping[str, Policy | str] | None = None,
    memory_budget: int | str | None = None,
    compile: bool | Mapping[str, Any] = False,  # noqa: A002  # as PyTorch calls it
) -> OffloadedLayers:
    """Offload or recompute the activations of ``layers``, without a change to the model.

    With ``memory_budget``, a plan keeps, offloads or recomputes each region of each layer within that device memory.
    With ``num_layers``, the first layers are offloaded whole. The library adds forward hooks to the layers; the model's
    ``state_dict`` does not change, and a copy or pickle of the model is one without offloading::

        with offload_layers(model.model.layers, memory_budget="40GiB") as handle:
            model(**batch).loss.backward()
        print(handle.stats())

    Args:
        layers: The layers in the order in which forward calls them: an ``nn.ModuleList``, an ``nn.Sequential``, any
            iterable of modules. A layer may be skipped in a forward, or called several times.
        num_layers: How many to offload, the first ones; at most ``len(layers) - 1``. By default 4, or all layers but
            the last of fewer than 5.
        schedule: A schedule of your own over ``len(layers)`` layers, on one device, in place of the default one.
        plan: The result of :func:`offload.plan`, with its policies of regions where it has some, in place of
            ``num_layers``. It is followed as it is. On the CPU, a warning says if it breaks its budget;
            ``memory_budget`` alone measures what a step needs, and corrects its plan.
        min_bytes: Storages smaller than this are kept on the device; bytes, or a text such as ``"1MiB"``.
        device: The device whose activations are offloaded; by default the one that the layers' parameters are on, or
            where they compute if their weights are streamed. Call ``offload_layers`` once for the layers of each
            device.
        max_host_bytes: The most pinned host memory to use for a device, in bytes or as a text such as ``"40GiB"``; by
            default what the system has left. Activations that do not fit are kept on the device, with one warning.
            A plan for ``memory_budget`` counts what others hold of the pool, such as optimizer state; the weights of
            :func:`stream_weights` are outside of it.
        policies: What happens to the regions of each layer: patterns of their names (a module, and the operation that
            it runs, such as ``"mlp.up_proj: mm"``; or the operation alone), each with ``"keep"``, ``"offload"`` or
            ``"recompute"``. The first pattern that matches decides; a region that no pattern matches is kept. Regions
            with ``"offload"`` are offloaded in the first ``num_layers`` layers, which may be 0, and kept in the others.
            Regions with ``"recompute"`` are dropped: backward runs the layer's forward again, is handed what was kept,
            and skips the operations that nothing dropped depends on. In the first step each layer runs again at once,
            and a region whose bits differ is offloaded or kept in place of recomputed.
        memory_budget: The device memory that a step may add to weights and optimizer state, in bytes or as a text; or
            ``"auto"``, the free memory of the device. In place of numbers of layers, schedules and policies: the first
            two microbatches run with everything recomputed and are measured; the next follow a plan, which is the
            handle's ``plan`` and uses at most ``max_host_bytes``.
        compile: With ``memory_budget``, compile each layer; or arguments of ``torch.compile`` for that, such as
            ``{"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}``. The plan then decides for each layer
            whether its graph saves all, products and attention, attention, or the layer's inputs alone. So it does for
            layers that the program has compiled.

    Returns:
        A handle with ``stats()`` and ``remove()``, which is also a context manager.

    Raises:
        TypeError: ``layers`` does not hold modules, or an argument is of another type; the message says which, and what
            to write.
        ValueError: There are no layers, one is listed twice, inside another or offloaded already, the schedule does
            not fit their number, or arguments exclude each other.
    """
    modules = check_layers(layers, OffloadListener, "offloaded")
    schedule = check_choice(num_layers, schedule, plan, policies, memory_budget)
    if compile is not False and memory_budget is None:
        raise ValueError("compile must be given with memory_budget; without one, call layer.compile() on each layer.")
    if device is None:
        device = _device_of(modules)
    given: dict[str, Any] = {"min_bytes": min_bytes, "device": device, "max_host_bytes": max_host_bytes}
    if not (memory_budget is None and policies is None and plan is None):
        for number, module in enumerate(modules):
            if any(is_lazy(parameter) for parameter in module.parameters()):
                raise ValueError(
                    f"layer {number} ({type(module).__name__}) must know the shapes of its parameters, but it is lazy; "
                    "run the model once before."
                )
    if memory_budget is not None:
        return OffloadedLayers(follow_plan(modules, memory_budget, compile, **given))
    if schedule is None:
        default = min(DEFAULT_NUM_LAYERS, len(modules) - 1) if num_layers is None else num_layers
        schedule = Schedule.default(default, len(modules))
    if schedule.model_layers != len(modules):
        raise ValueError(f"the schedule must be over {len(modules)} layers, got one over {schedule.model_layers}")
    regions: Sequence[LayerPolicies | None] = () if plan is None else _planned(plan, modules)
    if policies is not None:
        patterns = parse_policies(policies)
        regions = alike([LayerPolicies(patterns, layer) for layer in modules])
    context = OffloadContext(schedule, len(modules), policies=regions, **given)
    # Hooks inside of a compiled call cannot count memory: they must not change the dispatch modes.
    if plan is not None and context.backend.device.type == "cpu" and not is_compiled(modules[0]):
        return OffloadedLayers(WatchedPlan(modules, context, plan), plan)
    return OffloadedLayers(HookedLayers(modules, context), plan)


def check_choice(
    num_layers: int | None = None,
    schedule: Schedule | None = None,
    plan: Plan | None = None,
    policies: Mapping[str, Policy | str] | None = None,
    memory_budget: int | str | None = None,
) -> Schedule | None:
    """Check the arguments of :func:`offload_layers` that decide what is offloaded; returns the schedule among them."""
    if schedule is not None:
        check_schedule(schedule)
    if isinstance(num_layers, str):
        raise TypeError(
            f"num_layers must be an int, got {num_layers!r}; for device memory, write memory_budget={num_layers!r}."
        )
    if num_layers is not None:
        check_int("num_layers", num_layers, least=0)
    for name, decides in (("memory_budget", memory_budget), ("plan", plan), ("schedule", schedule)):
        if num_layers is not None and decides is not None:
            raise ValueError(f"{name} excludes num_layers, which it decides; leave one of them out.")
    if memory_budget is not None and memory_budget != "auto":
        parse_budget(memory_budget)
    if memory_budget is not None and (schedule, plan, policies) != (None, None, None):
        raise ValueError("memory_budget excludes schedule, plan and policies, which it decides; give it alone.")
    if plan is not None:
        for name, value in (("schedule", schedule), ("policies", policies)):
            if value is not None:
                raise ValueError(f"{name} and plan exclude each other; give one.")
        check_type("plan", plan, Plan, "what offload.plan returns")
        return plan.schedule
    if policies is not None:
        parse_policies(policies)
    return schedule


def _device_of(modules: Sequence[nn.Module]) -> torch.device | None:
    """The one device on which the layers compute."""
    found = [compute_device([layer]) or next((each.device for each in layer.parameters()), None) for layer in modules]
    devices = {device for device in found if device is not None and device.type != "meta"}
    accelerators = {device for device in devices if device.type != "cpu"}
    if len(accelerators) > 1:
        raise ValueError(
            f"layers must be on one device, got layers on {', '.join(sorted(map(str, accelerators)))}; call "
            "offload_layers once for the layers of each device."
        )
    return next(iter(accelerators or devices), None)


def _planned(plan: Plan, modules: Sequence[nn.Module]) -> list[LayerPolicies | None]:
    """The policies of a plan, if it has any."""
    if not any(plan.policies):
        return []
    regions = [
        None if one is None else LayerPolicies({"*": Policy.OFFLOAD}, layer, planned=(one, planned.regions))
        for layer, one, planned in zip(modules, plan.policies, plan.profile.layers, strict=True)
    ]
    alike([one for one in regions if one is not None])
    return regions
