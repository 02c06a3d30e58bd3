"""Schedules, profiles and links for tests: named ones, and hypothesis' strategies that draw them."""

import warnings

from hypothesis import strategies as st

from offload.planning.profile import LayerProfile, Link
from offload.schedule.points import Move, Point, backward, forward
from offload.schedule.schedule import Schedule


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
