"""The five states of an activation set, and the only moves between them."""

from __future__ import annotations

from enum import Enum


class OffloadState(Enum):
    """State of one activation set: who owns its memory."""

    RESIDENT = "resident"
    """The device holds it, nothing was copied."""
    OFFLOADING = "offloading"
    """The device holds it, and copies to the host are queued."""
    OFFLOADED = "offloaded"
    """The host holds it, the device memory was let go."""
    RELOADING = "reloading"
    """The host holds it, and copies into new device buffers are queued."""
    RELOADED = "reloaded"
    """The device holds it again, backward has begun to read it."""


class OffloadStateError(RuntimeError):
    """A call that the layer's state does not allow; the message says what to call instead."""


RESIDENT, OFFLOADING, OFFLOADED = OffloadState.RESIDENT, OffloadState.OFFLOADING, OffloadState.OFFLOADED

_MOVES = {
    "start_offload_layer": (RESIDENT, OFFLOADING),
    "release_activation_forward_gpu_memory": (OFFLOADING, OFFLOADED),
    "start_reload_layer": (OFFLOADED, OffloadState.RELOADING),
}
"""Call of the manual synchronizer → the state that it needs, and the state that it leads to."""
_REMEDY = {
    RESIDENT: "call start_offload_layer first",
    OFFLOADING: "call release_activation_forward_gpu_memory next",
    OFFLOADED: "call start_reload_layer next, or let backward reload it on demand",
    OffloadState.RELOADING: "nothing is left to call: backward waits for the reload by itself",
    OffloadState.RELOADED: "nothing is left to call: its backward has already begun",
}


def next_state(call: str, layer: int, state: OffloadState) -> OffloadState:
    """The state that a call of the manual synchronizer leads to.

    Raises:
        OffloadStateError: The call is not allowed in ``state``.
    """
    needed, reached = _MOVES[call]
    if state is not needed:
        raise OffloadStateError(
            f"{call}({layer}): layer {layer} must be {needed.name}, but it is {state.name}; {_REMEDY[state]}."
        )
    return reached
