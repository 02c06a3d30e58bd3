"""The manual synchronizer: the three verbs of an activation set, called by the user.

For programs that no schedule describes. The context still decides which tensors belong to which layer; when
they move is up to the caller, who may have several microbatches in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.activations.states import OffloadState, OffloadStateError
from offload.base.checks import is_int

if TYPE_CHECKING:
    from offload.activations.activation_set import ActivationSet
    from offload.activations.context import OffloadContext


class ManualOffloadSynchronizer:
    """Says when each layer's activation set moves; a layer for which nothing is called stays on the device.

    Made by ``get_cpu_offload_context(manual_synchronization=True)``. Per layer and microbatch the calls come in the
    order of the methods below. Backward needs no call: it waits for each reload by itself, and reloads a layer
    that was released and not reloaded when it gets there, which is counted in ``stats().late_reloads``.

    Each call speaks of one microbatch, that is of one round through the layers. Without ``microbatch``,
    :meth:`start_offload_layer` means the one whose forward began last, and the two others the oldest one in which
    the layer's state allows the call. Under ``torch.no_grad()`` no round begins and the calls do nothing.
    """

    def __init__(self, context: OffloadContext) -> None:
        self._context = context

    @property
    def microbatch(self) -> int:
        """Number of the microbatch whose forward began last, counted from 0; -1 before the first."""
        return self._context.microbatch

    def start_offload_layer(self, layer_id: int, *, microbatch: int | None = None) -> None:
        """Queue the copies to the host of what the layer has saved; inside its forward, also of what it will save.

        Each copy waits until its tensor has been computed.

        Args:
            layer_id: The layer, 0 to ``model_layers - 1``.
            microbatch: Which one, as :attr:`microbatch` counted; by default the one whose forward began last.

        Raises:
            OffloadStateError: The layer has not run forward, or its offload was started before.
            ValueError: There is no such layer or microbatch.
        """
        moving = self._find("start_offload_layer", layer_id, microbatch)
        if moving is None:
            return
        if moving.gone:
            raise OffloadStateError(
                f"start_offload_layer({layer_id}): layer {layer_id} must be RESIDENT, but its backward is over; "
                "call it between the layer's forward and its backward."
            )
        moving.start_offload("start_offload_layer")

    def release_activation_forward_gpu_memory(self, layer_id: int, *, microbatch: int | None = None) -> None:
        """Let the layer's device memory go; compute waits, on the device, until the copies are done.

        Args:
            layer_id: The layer, 0 to ``model_layers - 1``.
            microbatch: Which one; by default the oldest one whose offload has been started.

        Raises:
            OffloadStateError: The layer's offload was not started, or it was released before.
            ValueError: There is no such layer or microbatch.
        """
        call = "release_activation_forward_gpu_memory"
        moving = self._find(call, layer_id, microbatch, OffloadState.OFFLOADING)
        if moving is not None:
            moving.release(call)

    def start_reload_layer(self, layer_id: int, *, microbatch: int | None = None) -> None:
        """Queue the copies back to the device, in the order in which backward will ask for them.

        Args:
            layer_id: The layer, 0 to ``model_layers - 1``.
            microbatch: Which one; by default the oldest one that has been released.

        Raises:
            OffloadStateError: The layer was not released, or its reload was started before.
            ValueError: There is no such layer or microbatch.
        """
        moving = self._find("start_reload_layer", layer_id, microbatch, OffloadState.OFFLOADED)
        if moving is not None:
            moving.start_reload("start_reload_layer")

    def __repr__(self) -> str:
        return f"ManualOffloadSynchronizer({self._context.model_layers} layers, microbatch={self.microbatch})"

    def _find(
        self, call: str, layer: int, microbatch: int | None, needed: OffloadState | None = None
    ) -> ActivationSet | None:
        """The activation set that a call means; ``None`` if there is nothing to move."""
        self._check(layer, microbatch)
        newest = self.microbatch
        if microbatch is None and needed is not None:
            for moving in self._context.sets_of(layer):
                if moving.state is needed:
                    return moving
        found = self._context.set_of(newest if microbatch is None else microbatch, layer)
        if self._context.skipped and (found is None or microbatch is None or microbatch == newest):
            return None  # The forward that the caller speaks of ran without gradients.
        if found is None and microbatch in (None, newest):
            raise OffloadStateError(
                f"{call}({layer}): layer {layer} must have run forward, but it has not run in microbatch {newest}; "
                "call it inside the layer's forward or after it."
            )
        return found

    def _check(self, layer: int, microbatch: int | None) -> None:
        layers, newest = self._context.model_layers, self.microbatch
        if not is_int(layer, 0, layers - 1):
            raise ValueError(f"layer_id must be an int from 0 to model_layers - 1 = {layers - 1}, got {layer!r}")
        if microbatch is not None and not is_int(microbatch, 0, newest):
            raise ValueError(
                f"microbatch must be from 0 to {newest}, that of the last forward, got {microbatch!r}; note "
                "synchronizer.microbatch when a forward has run"
            )
