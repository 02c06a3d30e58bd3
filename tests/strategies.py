"""Schedules, profiles and links for tests: named ones, and hypothesis' strategies that draw them."""

import warnings
from dataclasses import replace

from hypothesis import strategies as st

from offload.planning.layer_costs import inputs_of, region_costs, saved_of
from offload.planning.profile import HostSeconds, LayerProfile, Link, Profile
from offload.recompute.costs import LayerPolicy, RegionProfile
from offload.schedule.schedule import Move, Point, Schedule, backward, forward


def points(text: str) -> list[str]:
    return text.split()


PIPELINE = {
    1: (False, 0, True, 4),
    2: (False, 0, True, 5),
    3: (True, 4, True, 6),
    4: (True, 5, True, 7),
    5: (True, 6, False, 4),
    6: (True, 7, False, 5),
}
PIPELINE_ORDER = points("F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7")


def default(num_layers: int, model_layers: int) -> Schedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Schedule.default(num_layers, model_layers)


sizes = st.integers(1, 12).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@st.composite
def schedules(draw) -> Schedule:
    """A schedule with random moves along a random order of the points."""
    model_layers = draw(st.integers(1, 5))
    order: list[Point] = []
    while len(order) < 2 * model_layers:
        started = [point.layer for point in order if point.phase == "F"]
        ended = [point.layer for point in order if point.phase == "B"]
        options = [backward(layer) for layer in started if layer not in ended]
        if len(started) < model_layers:
            options.append(forward(len(started)))
        order.append(draw(st.sampled_from(options)))
    moves = []
    for layer in draw(st.sets(st.integers(0, model_layers - 1))):
        alive = order[order.index(forward(layer)) + 1 : order.index(backward(layer)) + 1]
        if len(alive) >= 2:
            release = draw(st.integers(0, len(alive) - 2))
            reload = draw(st.integers(release + 1, len(alive) - 1))
            moves.append(Move(layer, alive[release], alive[reload]))
    return Schedule(model_layers, tuple(moves), tuple(order))


seconds = st.floats(1e-4, 1.0)
layer_profiles = st.builds(
    lambda forward_s, backward_s, tensors: LayerProfile(forward_s, backward_s, sum(tensors), tuple(tensors)),
    seconds,
    seconds,
    st.lists(st.integers(1, 10**9), max_size=4),
)
links = st.builds(Link, *3 * [st.floats(1e8, 1e11)])


def region(
    name: str, mib: float, ms: float, *reads: int, saved: bool = True, recomputable: bool = True
) -> RegionProfile:
    return RegionProfile(name, round(mib * (1 << 20)), ms / 1e3, reads, saved, recomputable)


@st.composite
def region_layers(draw) -> LayerProfile:
    """A layer that is given something, and computes from it."""
    regions = [region("input", draw(st.integers(0, 100)), 0, recomputable=False)]
    for number in range(1, draw(st.integers(2, 6))):
        reads = draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=2))
        saved, recomputable = draw(st.booleans()), draw(st.integers(0, 4)) > 0
        mib, ms = draw(st.integers(0, 100)), draw(st.integers(0, 50)) / 10
        made = region(f"r{number}", mib, ms, *sorted(reads), saved=saved, recomputable=recomputable)
        if number > 1 and draw(st.integers(0, 4)) == 0:  # another result of the operation before
            last = regions[-1]
            first = number - 1 if last.another_of is None else last.another_of
            made = replace(last, name=made.name, nbytes=made.nbytes, seconds=0.0, saved=saved, another_of=first)
        regions.append(made)
    if draw(st.booleans()):  # as a compiled layer, whose backward needs other amounts than its regions add up to
        regions = [replace(one, spared_bytes=draw(st.integers(-50, 50)) * (1 << 20)) for one in regions]
    forward_s, backward_s = draw(st.integers(1, 50)) / 1e3, draw(st.integers(1, 50)) / 1e3
    host = HostSeconds(*draw(st.just(()) | st.tuples(*[st.integers(0, 100).map(lambda ms: ms / 1e3)] * 4)))
    return LayerProfile.from_regions(
        regions,
        forward_s,
        backward_s,
        workspace_bytes=draw(st.integers(0, 50)) * (1 << 20),
        after_second_run_bytes=draw(st.integers(0, 50)) * (1 << 20),
        freed_sooner_bytes=draw(st.integers(0, 50)) * (1 << 20),
        small_bytes=draw(st.integers(0, 5)) * (1 << 20),
        forward_workspace_bytes=draw(st.integers(0, 500)) * (1 << 20),
        host=host,
    )


@st.composite
def steps(draw, of_schedules=None) -> tuple[Schedule, Profile, Link, list[LayerPolicy | None]]:
    """A schedule, and layers with and without regions, those with regions under random policies."""
    schedule = draw(schedules() if of_schedules is None else of_schedules)
    count = schedule.model_layers
    layers = draw(st.lists(layer_profiles | region_layers(), min_size=count, max_size=count))
    policies: list[LayerPolicy | None] = []
    for layer in layers:
        some = st.sets(st.sampled_from(sorted(saved_of(layer.regions) | inputs_of(layer.regions)) or [0]))
        kept = region_costs(layer.regions, frozenset(draw(some))).kept
        policies.append(LayerPolicy(kept, kept & frozenset(draw(some))) if layer.regions else None)
    other = draw(st.floats(0, 0.1)), draw(st.floats(0, 0.1)), draw(st.integers(0, 200)) << 20
    return schedule, Profile(tuple(layers), *other), draw(links), policies
