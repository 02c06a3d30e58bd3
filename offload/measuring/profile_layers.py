"""What the layers of a model cost: seconds, bytes, and regions, measured in steps of the model."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn

from offload.activations import selective
from offload.activations.context import DEFAULT_MIN_BYTES, OffloadContext
from offload.activations.copies import NO_HOST_MEMORY
from offload.activations.module_hooks import HookedLayers
from offload.activations.stats import OffloadStats
from offload.base.checks import check_callable, check_int, format_bytes, format_s, parse_bytes
from offload.base.find_layers import check_layers
from offload.base.layer_events import LayerListener, Turn, listeners_on
from offload.device.backend import Backend
from offload.device.select import get_backend
from offload.measuring.layer_times import LayerTimes, MeasuredLayer
from offload.measuring.queueing import PASSES
from offload.observe.memory import memory_peak
from offload.planning.layer_costs import costs_of, inputs_of, peak_bytes, region_costs, with_workspace
from offload.planning.plan import Plan
from offload.planning.profile import HostSeconds, LayerProfile, Link, Profile
from offload.planning.search import layers_of_kinds
from offload.recompute.costs import LayerPolicy, RegionProfile
from offload.recompute.layer_policies import LayerPolicies, alike
from offload.recompute.policies import Policy
from offload.recompute.way import shared_inputs
from offload.schedule.schedule import Schedule

_logger = logging.getLogger(__name__)


def profile_layers(
    layers: Iterable[torch.nn.Module],
    step: Callable[[], object],
    *,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    steps: int = 3,
    regions: bool = False,
) -> Profile:
    """Measure what each layer of a model costs.

    ``step`` is called ``steps + 2`` times: to count what is saved, to see how much memory is taken, then to take times,
    of which the median counts. The steps change parameters and gradients as they do in training. With ``regions``,
    everything is recomputed and inputs are offloaded meanwhile, so that models can be measured that do not fit.

    Args:
        layers: The modules to be offloaded, in call order. Nothing must offload them yet.
        step: Runs forward and backward of at least one microbatch.
        min_bytes: Storages below this size are not offloaded and not counted; bytes, or a text such as ``"1MiB"``.
        device: Where the layers run; ``None`` is the current accelerator, and the CPU where there is none.
        steps: How many steps are timed.
        regions: Measure each region of the layers, too: in one step each layer's forward runs a second time: what
            it saves is compared, and each operation is timed.

    Raises:
        ValueError: A layer did not run or is offloaded already, or no layer saved anything that can be offloaded.
        torch.OutOfMemoryError: The model does not fit.

    Note:
        A layer's backward begins when the gradient of one of its outputs is complete, and ends when that
        of its first input is. Where no input needs one, it ends with that of its last parameter, or with the
        whole backward if its weights are streamed. A step may run several microbatches; the profile is that
        of one. On an accelerator, the allocator is asked to forget earlier peaks.
    """
    check_int("steps", steps, least=1)
    check_callable("step", step)
    modules = check_layers(layers, MeasuredLayer, "measured")
    for number, layer in enumerate(modules):
        if any(listener.turn is Turn.ACTIVATIONS for listener in listeners_on(layer, LayerListener)):
            raise ValueError(
                f"layers must not be offloaded while they are profiled, but layer {number} is, and saves less than it "
                "would; call remove() on its handle first."
            )
    min_bytes = parse_bytes(min_bytes, "min_bytes")
    backend = get_backend(device)
    begin_s = time.perf_counter()
    found = (_measure_recomputed if regions else _measure)(modules, step, min_bytes, backend, steps)
    if not found.saved_bytes:
        raise ValueError(
            f"no layer saved at least min_bytes = {min_bytes} bytes at once on {backend.device}; lower min_bytes, or "
            "profile the layers before they are offloaded."
        )
    amounts = len(modules), format_s(time.perf_counter() - begin_s), format_bytes(found.saved_bytes)
    _logger.info("profiled %d layers in %s; they save %s", *amounts)
    return found


def _measure(
    modules: list[nn.Module], step: Callable[[], object], min_bytes: int, backend: Backend, steps: int
) -> Profile:
    """A profile of layers as they are."""
    with LayerTimes(modules, backend, min_bytes) as times:
        with torch.autograd.graph.saved_tensors_hooks(times.pack, lambda tensor: tensor), selective.sees(times):
            step()
        times.start(memory_peak(backend.device))
        step()  # without hooks, under which some tensors live longer
        times.time(step, steps)
    saved = [tuple(layer.tensors.values()) for layer in times.layers]
    host_s = map(sum, zip(*(_filled(times.host_s(phase)) for phase in PASSES), strict=True))
    profiles = tuple(
        LayerProfile(*seconds, sum(tensors), tensors, host=HostSeconds(each_s))
        for seconds, tensors, each_s in zip(times.seconds(), saved, host_s, strict=True)
    )
    return with_workspace(Profile(profiles, times.loss_s(), times.other_s()), times.peaks())


def _measure_recomputed(
    modules: list[nn.Module], step: Callable[[], object], min_bytes: int, backend: Backend, steps: int
) -> Profile:
    """A profile with regions, of layers that recompute everything and offload their inputs."""
    # In the first step each operation is run once more, compared and timed.
    policies, schedule = learning_policies(modules), learning_schedule(len(modules))
    context = OffloadContext(schedule, len(modules), min_bytes=min_bytes, device=backend.device, policies=policies)
    with HookedLayers(modules, context):
        step()
        with LayerTimes(modules, backend) as times:
            hold_some(policies)
            times.start(memory_peak(backend.device))
            step()
            time_second_runs(policies, backend)
            times.time(step, steps)
    profile, _ = learned_profile(policies, counted_once(policies), times)
    return replace(profile, other_s=times.other_s())


def hold_some(policies: Iterable[LayerPolicies]) -> None:
    """Let every other layer of a kind hold what it recomputes as long as what it keeps: what that needs is measured."""
    kinds: defaultdict[object, list[LayerPolicies]] = defaultdict(list)
    for one in policies:
        if one.runs_again:
            kinds[tuple((region.name, region.nbytes) for region in one.costs)].append(one)
    for same in kinds.values():
        for place, one in enumerate(same):
            one.holds = place % 2 == 0 or len(same) < 3


def time_second_runs(policies: Iterable[LayerPolicies], backend: Backend) -> None:
    """Take the time of each second run from now on."""
    for one in policies:
        one.clock, one.second_runs = backend.mark, []


def end_second_runs(policies: Iterable[LayerPolicies]) -> None:
    """Time and hold them no more."""
    for one in policies:
        one.clock, one.holds = None, False


def learning_policies(layers: Iterable[nn.Module]) -> list[LayerPolicies]:
    """Policies under which layers recompute everything, and learn what their regions cost."""
    return alike([LayerPolicies({"*": Policy.RECOMPUTE}, layer, measures=True) for layer in layers])


def learning_schedule(count: int) -> Schedule:
    """The schedule of those steps: as many layers are offloaded as can be without waiting for each copy."""
    return Schedule.default(max(0, count - 2), count)


def counted_once(policies: Sequence[LayerPolicies]) -> list[tuple[RegionProfile, ...]]:
    """The regions that layers have learned. No layer counts an input that the last layer shares, such as a mask.

    It is on the device all the time from here on: what is measured beside the regions has it.
    """
    shared = shared_inputs([one.given for one in policies])
    for one in policies if shared else ():
        one.share(shared)
    return [one.costs for one in policies]


def _shared_later(policies: Sequence[LayerPolicies]) -> int:
    """Bytes of inputs that no layer counts, and that the first is not given: the model has made them before that.

    Or the first layer has, as T5's: then they count twice, in what was measured, too.
    """
    first, *others = policies
    found = {memory: nbytes for one in others for memory, nbytes in one.shared_bytes.items()}
    return sum(nbytes for memory, nbytes in found.items() if memory not in first.given)


def recompute_all(profile: Profile) -> list[LayerPolicy | None]:
    """The policies of those steps: everything is recomputed that can be; the rest is offloaded."""
    kept = [region_costs(layer.regions, frozenset()).kept for layer in profile.layers]
    return [LayerPolicy(one, one) if layer.regions else None for one, layer in zip(kept, profile.layers, strict=True)]


def recomputed_plan(profile: Profile, link: Link, memory_budget: int, max_host_bytes: int | None) -> Plan:
    """As layers run while they are measured: everything is recomputed, and as many inputs as fit are offloaded."""
    count, policies = len(profile.layers), (*recompute_all(profile),)
    most = len(learning_schedule(count).offloaded_layers)
    plans = (
        Plan(Schedule.default(number, count), profile, link, memory_budget, policies, max_host_bytes)
        for number in range(most, -1, -1)
    )
    return next(one for one in plans if max_host_bytes is None or one.host_bytes <= max_host_bytes)


def learned_profile(
    policies: Sequence[LayerPolicies],
    regions: Sequence[Sequence[RegionProfile]],
    times: LayerTimes,
    moved: OffloadStats | None = None,
) -> tuple[Profile, int]:
    """What the layers with these regions cost if nothing is recomputed, from steps in which everything is.

    If all that was timed has had one backward, with what it has ``moved``, layers that have run several times are
    called so often.

    Returns:
        The profile of the layers that ran, and the most that is measured of what these need in such a step.
    """
    # The regions' seconds are those of the second runs in these steps, as each region would share them. An operation
    # that is timed alone, behind a pause, takes another time than in a row.
    ran = [(policies[number], regions[number]) for number in times.ran]
    alone_s = [region_costs(tuple(costs), frozenset()).recompute_s for _, costs in ran]
    # The backward of a compiled layer recomputes without a second run, and was timed as a whole at each level.
    again_s = [
        statistics.median(times.backend.seconds((begin, end) for begin, end, _ in one.second_runs) or [0.0])
        if one.runs_again
        else recompute_s
        for (one, _), recompute_s in zip(ran, alone_s, strict=True)
    ]
    run_again = [number for number, (one, _) in enumerate(ran) if one.runs_again]
    again, alone = (math.fsum(seconds[number] for number in run_again) for seconds in (again_s, alone_s))
    ratio = again / alone if min(again, alone) > 0 else 1.0
    layers = []
    for (one, costs), (forward_s, backward_s), run_s, host in zip(
        ran, times.seconds(), again_s, _host_seconds([one for one, _ in ran], times), strict=True
    ):
        timed = [replace(region, seconds=(ratio if one.runs_again else 1.0) * region.seconds) for region in costs]
        times_s = forward_s, max(forward_s, backward_s - run_s)
        layers.append(LayerProfile.from_regions(timed, *times_s, small_bytes=one.small_bytes, host=host))
    calls = tuple(map(times.ran.index, times.calls)) if moved is not None else ()
    profile = Profile(tuple(map(_with_one_input, layers)) if calls else tuple(layers), times.loss_s(), calls=calls)
    num_layers = len({*learning_schedule(len(policies)).offloaded_layers} & {*times.ran})
    instant, inputs_alone = Link(1.0, 1.0, 1.0), recompute_all(profile)
    released = range(num_layers)
    if moved is not None and NO_HOST_MEMORY in moved.skipped:  # inputs of later layers were kept on the device
        offloaded = costs_of(profile, instant, released, inputs_alone)[:num_layers]
        sent = accumulate(one.offloaded_bytes for one in offloaded)
        released = range(sum(nbytes <= moved.offloaded_bytes for nbytes in sent))
    profile = with_workspace(profile, times.peaks(), num_layers, inputs_alone, released)
    recomputed = costs_of(profile, instant, released, inputs_alone)
    holds = [one.holds for one, _ in ran]
    expected = peak_bytes(recomputed, num_layers, profile.loss_bytes, profile.calls)
    pairs = zip(profile.layers, layers, strict=True)
    every = (replace(one, regions=own.regions, tensors=(), saved_bytes=own.saved_bytes) for one, own in pairs)
    if moved is not None:  # the memory was measured from the first layer on
        expected -= _shared_later(policies)
    return _with_freed_sooner(replace(profile, layers=tuple(every)), holds), expected


def _with_one_input(layer: LayerProfile) -> LayerProfile:
    """A layer as if it had its smallest input alone: all of its calls may be given the same others.

    What is measured beside the layers would be too little if those were counted for each call.
    """
    given = [number for number in inputs_of(layer.regions) if layer.regions[number].nbytes]
    others = {*sorted(given, key=lambda number: layer.regions[number].nbytes)[1:]}
    regions = [replace(one, nbytes=0) if number in others else one for number, one in enumerate(layer.regions)]
    times_s = layer.forward_s, layer.backward_s
    return LayerProfile.from_regions(regions, *times_s, small_bytes=layer.small_bytes, host=layer.host)


def _with_freed_sooner(profile: Profile, holds: Sequence[bool]) -> Profile:
    """With what layers need less if they are recomputed as a whole, from layers that have held that and others."""
    layers = [*profile.layers]
    for numbers in layers_of_kinds(profile):
        # Each is compared with both of its neighbours: gradients and small tensors add up from layer to layer.
        needed = [(layers[number].workspace_bytes, holds[number]) for number in numbers]
        differences = [
            (1 if held else -1) * (nbytes - (before + after) / 2)
            for (before, first), (nbytes, held), (after, last) in zip(needed, needed[1:], needed[2:], strict=False)
            if first is last is not held
        ]
        sooner = max(0, round(statistics.median(differences or [0.0])))
        for number, (nbytes, held) in zip(numbers, needed, strict=True):
            workspace_bytes = nbytes + (0 if held else sooner)
            layers[number] = replace(layers[number], workspace_bytes=workspace_bytes, freed_sooner_bytes=sooner)
    return replace(profile, layers=tuple(layers))


def _host_seconds(policies: Sequence[LayerPolicies], times: LayerTimes) -> Iterator[HostSeconds]:
    """What each layer costs the host, from steps in which everything is recomputed."""
    # A second run is a forward of which everything is kept. One that waits for the device says nothing.
    forwards_s, backwards_s = times.host_s("forward"), times.host_s("backward")
    runs_s = [
        statistics.median([run_s for *_, run_s in one.second_runs] or [0.0]) if backward_s else 0.0
        for one, backward_s in zip(policies, backwards_s, strict=True)
    ]
    every = [*zip(policies, *map(_filled, (forwards_s, backwards_s, runs_s)), strict=True)]
    for one, forward_s, backward_s, run_s in every:
        if one.host_s is not None:  # those that are alike have the same, and the compiler has just slowed some
            took_s = min(forth_s + back_s for other, forth_s, back_s, _ in every if other.host_s == one.host_s)
            kept_s, again_s = one.host_s
            yield HostSeconds(kept_s, second_run_s=again_s, copies_s=max(0.0, took_s - kept_s - again_s))
            continue
        plain_s, again_s = min(forward_s, run_s or forward_s), min(backward_s, run_s)
        yield HostSeconds(plain_s + backward_s - again_s, forward_s - plain_s, again_s)


def _filled(seconds: Sequence[float]) -> list[float]:
    """With the median of those that are known in place of the others."""
    typical_s = statistics.median([one for one in seconds if one] or [0.0])
    return [one or typical_s for one in seconds]
