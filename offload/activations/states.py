"""The five states of an activation set, and the only moves between them.

======================  ==================================================================
state                   who owns the memory
======================  ==================================================================
``RESIDENT``            the device holds it, nothing was copied
``OFFLOADING``          the device holds it and copies to the host are queued
``OFFLOADED``           the host holds it, the device memory was let go
``RELOADING``           the host holds it and copies into new device buffers are queued
``RELOADED``            the device holds it again, backward has begun to read it
======================  ==================================================================
"""

from __future__ import annotations

from enum import Enum


class OffloadState(Enum):
    """State of one activation set; see the module's table for who owns which memory."""

    RESIDENT = "resident"
    OFFLOADING = "offloading"
    OFFLOADED = "offloaded"
    RELOADING = "reloading"
    RELOADED = "reloaded"


class OffloadStateError(RuntimeError):
    """A call that the layer's state does not allow; the message says what to call instead."""


TRANSITIONS: dict[str, tuple[OffloadState, OffloadState]] = {
    "start_offload": (OffloadState.RESIDENT, OffloadState.OFFLOADING),
    "release": (OffloadState.OFFLOADING, OffloadState.OFFLOADED),
    "start_reload": (OffloadState.OFFLOADED, OffloadState.RELOADING),
    "unpack": (OffloadState.RELOADING, OffloadState.RELOADED),
}
"""Verb → (state it needs, state it leads to)."""

_CALLS = {
    "start_offload": "start_offload_layer",
    "release": "release_activation_forward_gpu_memory",
    "start_reload": "start_reload_layer",
}
_REMEDY = {
    OffloadState.RESIDENT: f"call {_CALLS['start_offload']} first",
    OffloadState.OFFLOADING: f"call {_CALLS['release']} next",
    OffloadState.OFFLOADED: f"call {_CALLS['start_reload']} next, or let backward reload it on demand",
    OffloadState.RELOADING: "nothing is left to call: backward waits for the reload by itself",
    OffloadState.RELOADED: "nothing is left to call: its backward has already begun",
}


def next_state(verb: str, layer: int, state: OffloadState) -> OffloadState:
    """The state that ``verb``, a key of :data:`TRANSITIONS`, leads to.

    Raises:
        OffloadStateError: The verb is not allowed in ``state``; it names the call of the manual synchronizer.
    """
    needed, reached = TRANSITIONS[verb]
    if state is not needed:
        raise OffloadStateError(
            f"{_CALLS[verb]}({layer}): layer {layer} must be {needed.name}, but it is {state.name}; {_REMEDY[state]}."
        )
    return reached
