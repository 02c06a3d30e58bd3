"""The ways to train that the start page compares, in Python: what tests/pages/test_planner.py expects of the page."""

import sys
from dataclasses import dataclass, replace

from offload.base.checks import format_bytes
from offload.measuring.memory_left import AUTO_SHARE
from offload.planning.plan import make_plan

LAYERS = "model.model.layers"


@dataclass(frozen=True)
class Way:
    name: str
    write: str
    misfit: str = ""
    step_s: float | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None


def ways_to_train(profile, inside, outside, state, memory, link, host):
    """Of parameters in bfloat16, so many in the layers and outside of them, with so many bytes of optimizer state."""
    count, fixed, usable = len(profile.layers), 2 + state, int(AUTO_SHARE * memory)
    budget = usable - (inside + outside) * fixed
    left = budget - 2 * (inside + outside)
    kept = make_plan(profile, sys.maxsize, link)
    misfit = "" if kept.peak_bytes <= left else f"activations and loss take {format_bytes(kept.peak_bytes)}"
    misfit = misfit if left >= 0 else f"{format_bytes(-left)} are missing for what is fixed"
    yield Way("keep all", "offload nothing", misfit, kept.step_s, kept.peak_bytes, 0)
    whole = replace(profile, layers=tuple(replace(layer, regions=()) for layer in profile.layers))
    way, made = planned("whole layers", whole, left, link, host)
    yield replace(way, write=f"offload_layers({LAYERS}, num_layers={made.num_layers})") if made else way
    way, made = planned("regions", profile, left, link, host)
    yield replace(way, write=budgeted(budget)) if made else way
    # On the device are the weights of two layers, their gradients, and the parameters outside of the layers.
    layer_bytes = 2 * inside // count
    budget = usable - outside * fixed - 4 * layer_bytes
    on_host = inside * (fixed + 2)
    rest = None if host is None else host - on_host
    way, made = planned("streamed weights", profile, budget - 2 * outside, link, rest)
    if made:
        limit = "" if host is None else f', max_host_bytes="{size_of(host)}"'
        dtype = ", state_dtype=torch.float32" if state == 8 else ""
        write = f'prepare(model, optimizer, memory_budget="{size_of(memory)}"{limit}{dtype})'
        d2h_s = (count * layer_bytes + made.host_bytes) / link.d2h_bytes_per_s
        h2d_s = (2 * (count - 1) * layer_bytes + made.host_bytes) / link.h2d_bytes_per_s
        peak, host_bytes = made.peak_bytes + 4 * layer_bytes, made.host_bytes + on_host
        way = replace(way, write=write, step_s=max(made.step_s, d2h_s, h2d_s), peak_bytes=peak, host_bytes=host_bytes)
    yield way


def choose(found):
    """The simplest way that fits; regions in place of whole layers where regions are faster."""
    fitting = {way.name: way for way in found if not way.misfit}
    whole, regions = fitting.get("whole layers"), fitting.get("regions")
    if whole and regions and "keep all" not in fitting and whole.step_s > 1.005 * regions.step_s:
        return regions
    return next(iter(fitting.values()), None)


def planned(name, profile, left, link, host):
    if left < 0:
        return Way(name, "", f"{format_bytes(-left)} are missing for what is fixed"), None
    if host is not None and host < 0:
        return Way(name, "", f"{format_bytes(-host)} of host memory are missing"), None
    try:
        made = make_plan(profile, left, link, max_host_bytes=host)
    except ValueError:
        within = "" if host is None else f" and {format_bytes(host)} on the host"
        return Way(name, "", f"{format_bytes(left)}{within} are too little for activations and loss"), None
    return Way(name, "", "", made.step_s, made.peak_bytes, made.host_bytes), made


def budgeted(nbytes):
    return f'offload_layers({LAYERS}, memory_budget="{size_of(nbytes)}")'


def size_of(nbytes):
    return f"{nbytes * 10 // 2**30 / 10}GiB" if nbytes >= 2**30 else f"{max(0, nbytes) // 2**20}MiB"
