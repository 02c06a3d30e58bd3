"""Schedules: the default one's promise, the declarative form, what is refused, the grid, and repr."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import PIPELINE, PIPELINE_ORDER, default, schedules, sizes

from offload.schedule.schedule import Move, Schedule, backward, forward


def model_order(model_layers: int) -> list[str]:
    return [f"F{i}" for i in range(model_layers)] + [f"B{i}" for i in reversed(range(model_layers))]


class TestDefault:
    def test_grid_2_of_5(self):
        assert str(Schedule.default(2, 5)).splitlines() == [
            "layer F0 F1 F2 F3 F4 B4 B3 B2 B1 B0",
            "    0  F  #  #  .  .  .  .  r  #  B",
            "    1     F  #  #  .  .  r  #  B",
            "    2        F  #  #  #  #  B",
            "    3           F  #  #  B",
            "    4              F  B",
        ]

    @given(sizes)
    def test_at_most_n_minus_k_sets_are_resident(self, size):
        num_layers, model_layers = size
        schedule = default(num_layers, model_layers)
        resident = dict(schedule.resident())
        assert max(map(len, resident.values())) == model_layers - num_layers
        for point, layers in resident.items():
            assert point.layer in layers, "a layer's set is on the device while it runs"

    def test_one_resident_set_warns(self):
        with pytest.warns(UserWarning, match=r"num_layers = model_layers - 1 = 4 keeps one activation set") as caught:
            Schedule.default(4, 5)
        assert "use num_layers=3 or less for overlap" in str(caught[0].message)

    @pytest.mark.parametrize(
        ("num_layers", "model_layers", "kind", "text"),
        [
            (5, 5, ValueError, "num_layers must be at most model_layers - 1 = 4, got 5"),
            (-1, 5, ValueError, "num_layers must be at least 0, got -1"),
            (0, 0, ValueError, "model_layers must be at least 1, got 0"),
            (2.0, 5, TypeError, r"num_layers must be an int, got 2\.0"),
            (True, 5, TypeError, "num_layers must be an int, got True"),
            (2, "5", TypeError, "model_layers must be an int, got '5'"),
        ],
    )
    def test_refuses(self, num_layers, model_layers, kind, text):
        with pytest.raises(kind, match=text):
            Schedule.default(num_layers, model_layers)


def test_another_order_than_a_model_s_must_be_given():
    with pytest.raises(ValueError, match=r"^layer 1: .* is refused: .* If the program runs in another order than F0, "):
        Schedule.from_synchronization_dict(PIPELINE, 8)
    schedule = Schedule.from_synchronization_dict(PIPELINE, 8, PIPELINE_ORDER)
    assert list(map(repr, schedule.order)) == PIPELINE_ORDER
    assert "[" not in repr(Schedule.default(2, 8)), "a model's order need not be written down"


ENTRY_WANTED = "the entry of layer 0 must be (offload_fwd: bool, offload_num: int, reload_fwd: bool, reload_num: int)"


class TestRefusals:
    @pytest.mark.parametrize(
        ("layer", "entry", "text"),
        [
            (5, (True, 3, False, 2), " names layer 5, but layers are numbered 0 to 4"),
            (0, (True, 7, False, 2), " names layer 7, but layers are numbered 0 to 4"),
            (0, (True, 3, False, -1), " names layer -1, but layers are numbered 0 to 4"),
            (2, (True, 1, False, 2), " is refused: it is released before F1, which is not after its own forward F2;"),
            (0, (True, 0, False, 2), " is refused: it is released before F0, which is not after its own forward F0;"),
            (1, (False, 1, False, 0), " is refused: it is released before B1, which is not earlier than its own back"),
            (0, (True, 3, True, 2), " is refused: its reload before F2 does not come after its release before F3; use"),
            (0, (True, 3, True, 3), " is refused: its reload before F3 does not come after its release before F3; use"),
        ],
    )
    def test_impossible_entry(self, layer, entry, text):
        with pytest.raises(ValueError, match="^" + re.escape(f"layer {layer}: {entry}{text}")):
            Schedule.from_synchronization_dict({layer: entry}, 5)

    @pytest.mark.parametrize("entry", [(1, 3, False, 0), (True, 3, False), None])
    def test_entry_of_another_form(self, entry):
        with pytest.raises(ValueError, match="^" + re.escape(f"{ENTRY_WANTED}, got {entry}")):
            Schedule.from_synchronization_dict({0: entry}, 5)

    def test_backward_before_its_reload_in_the_given_order(self):
        entries = {3: (True, 4, False, 2)}
        with pytest.raises(ValueError) as caught:
            Schedule.from_synchronization_dict(entries, 5, model_order(5))
        assert str(caught.value) == (
            "layer 3: (True, 4, False, 2) is refused: backward of layer 3 comes before its reload at B2; "
            "use an earlier reload"
        )

    @pytest.mark.parametrize("layer", ["0", True, 0.0, None])
    def test_key_that_is_no_layer(self, layer):
        with pytest.raises(TypeError, match=r"^the keys of synchronization_dict must be layers as int, got "):
            Schedule.from_synchronization_dict({layer: (True, 3, False, 2)}, 5)

    def test_no_dictionary(self):
        with pytest.raises(TypeError, match=r"^synchronization_dict must map layers to their entries, got list$"):
            Schedule.from_synchronization_dict([(True, 3, False, 2)], 5)

    def test_two_moves_of_one_layer(self):
        move = Move(0, forward(3), backward(2))
        with pytest.raises(ValueError, match=r"^layer 0 has more than one entry; give one$"):
            Schedule(5, (move, move))

    @pytest.mark.parametrize(
        ("order", "text"),
        [
            ("F0 F1 B0", r"order must hold each of F0 to F1 and B0 to B1 once, got \[F0, F1, B0\]"),
            ("F0 F1 B0 B0 B1", r"order must hold each of F0 to F1 and B0 to B1 once, got "),
            ("B0 F0 F1 B1", "order must run each layer's forward before its backward, got B0 before F0"),
            ("F0 F1 B0 X1", "a point must be written F<layer> or B<layer>, such as 'F4', got 'X1'"),
            ("F0 F1 B0 B", "a point must be written F<layer> or B<layer>, such as 'F4', got 'B'"),
        ],
    )
    def test_order(self, order, text):
        with pytest.raises(ValueError, match=f"^{text}"):
            Schedule.from_synchronization_dict({}, 2, order.split())


@given(schedules())
def test_repr_parses_back(schedule):
    assert eval(repr(schedule)) == schedule


@given(schedules(), st.data())
def test_set_is_on_the_host_from_release_to_reload(schedule, data):
    assume(schedule.moves)
    move = data.draw(st.sampled_from(schedule.moves))
    resident = dict(schedule.resident())
    position = {point: index for index, point in enumerate(schedule.order)}
    for point in schedule.order[position[forward(move.layer)] : position[backward(move.layer)] + 1]:
        on_host = position[move.release] <= position[point] < position[move.reload]
        assert (move.layer in resident[point]) != on_host


def test_equal_and_hashable_whatever_the_order_of_moves():
    a = Schedule.from_synchronization_dict({0: (True, 2, False, 1), 1: (True, 3, False, 2)}, 4)
    b = Schedule.from_synchronization_dict({1: (True, 3, False, 2), 0: (True, 2, False, 1)}, 4)
    assert a == b
    assert hash(a) == hash(b)


def test_of_reloads_at_one_point_the_one_that_backward_needs_first_comes_first() -> None:
    schedule = Schedule(4, (Move(0, forward(2), backward(2)), Move(1, forward(3), backward(2))))
    assert schedule.reloads(backward(2)) == (1, 0)
