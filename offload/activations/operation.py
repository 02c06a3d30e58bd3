"""The operation at work: what it has saved is copied when it is over.

Autograd may save a tensor before the kernel has run that writes it: ``rrelu`` saves its noise first and draws it then,
without a change of its version. So nothing is copied, and no ready event recorded, while the operation that saved may
still have kernels to queue. It is over when a later one saves, when the layer's forward ends, or when the program asks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch._C._autograd import _get_sequence_nr as next_node

if TYPE_CHECKING:
    from offload.activations.activation_set import ActivationSet
    from offload.activations.saved import SavedStorage
    from offload.activations.transfers import Transfers


class Operation:
    """The storages that the operation which saved last has saved; held weakly, as the graph owns them."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._saved: list[weakref.ref[SavedStorage]] = []
        self._node = -1
        self._stream = transfers.backend.compute_stream()

    def add(self, storage: SavedStorage) -> None:
        """The operation at work saves ``storage``."""
        if not self._saved:
            # The number that autograd gives to the next node grows with each operation before it saves anything.
            self._node = next_node()
            # Its kernels go to the stream of now, which need not be that of the operation after it.
            self._stream = self._transfers.backend.compute_stream()
        self._saved.append(weakref.ref(storage))

    def end_if_over(self) -> None:
        """End it if the one that saves now is another."""
        if self._saved and next_node() != self._node:
            self.end()

    def end(self) -> None:
        """It is over: one event marks all that it has saved as ready, and what is to travel now is copied."""
        saved, self._saved = self._saved, []
        storages = [storage for reference in saved if (storage := reference()) is not None]
        if not storages:
            return
        ready = self._stream.record_event()
        moving: ActivationSet | None = None
        for storage in storages:
            if moving is not None and storage.set is not moving:
                self._transfers.end_batch()  # else the release of the one would wait for copies of the other
            moving = storage.set
            if storage.ready is None:
                storage.ready = ready
            moving.follow(storage)
        if moving is not None and moving.closed:
            self._transfers.end_batch()
