"""The manual synchronizer: the three verbs of an activation set, called by the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.context import OffloadContext


class ManualOffloadSynchronizer:
    """Says when each layer's activation set moves; a layer for which nothing is called stays on the device.

    Made by ``get_cpu_offload_context(manual_synchronization=True)``.
    """

    def __init__(self, context: OffloadContext) -> None:
        self._context = context
