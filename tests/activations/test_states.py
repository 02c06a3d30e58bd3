"""The transition table and the error for what it does not allow."""

import itertools

import pytest

from offload import OffloadState, OffloadStateError
from offload.activations.states import TRANSITIONS, next_state


def test_one_way_from_the_device_to_the_host_and_back() -> None:
    state = OffloadState.RESIDENT
    passed = [state]
    for verb in ("start_offload", "release", "start_reload", "unpack"):
        state = next_state(verb, 0, state)
        passed.append(state)
    assert passed == list(OffloadState)


@pytest.mark.parametrize(("verb", "state"), list(itertools.product(TRANSITIONS, OffloadState)))
def test_everything_else_is_refused(verb: str, state: OffloadState) -> None:
    needed, reached = TRANSITIONS[verb]
    if state is needed:
        assert next_state(verb, 3, state) is reached
        return
    with pytest.raises(
        OffloadStateError, match=rf"{verb}\(3\): layer 3 must be {needed.name}, but it is {state.name};"
    ):
        next_state(verb, 3, state)


def test_error_names_the_call_and_what_to_call_instead() -> None:
    with pytest.raises(OffloadStateError) as raised:
        next_state("release", 7, OffloadState.RESIDENT, call="release_activation_forward_gpu_memory")
    assert str(raised.value) == (
        "release_activation_forward_gpu_memory(7): layer 7 must be OFFLOADING, but it is RESIDENT; "
        "call start_offload_layer first."
    )


def test_error_is_a_runtime_error() -> None:
    assert issubclass(OffloadStateError, RuntimeError)
