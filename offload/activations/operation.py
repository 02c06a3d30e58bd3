"""The operation at work: what it has saved is copied when it is over.

Autograd may save a tensor before the kernel has run that writes it: ``rrelu`` saves its noise first and draws it then,
without a change of its version. So nothing is copied, and no ready event recorded, while the operation that saved may
still have kernels to queue. It is over when a later one saves, when the layer's forward ends, or when the program asks.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch._C._autograd import _get_sequence_nr as next_node

from offload.activations.storage import SavedStorage
from offload.device.backend import Backend

Owner = TypeVar("Owner")


class Operation(Generic[Owner]):
    """The storages that the operation which saved last has saved, and for whom it did.

    They are held weakly: what the graph has let go of before the operation is over is not copied.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._saved: list[tuple[weakref.ref[SavedStorage], Owner]] = []
        self._node = -1
        self._stream = backend.compute_stream()

    def add(self, storage: SavedStorage, owner: Owner) -> None:
        """The operation at work saves ``storage``, for ``owner``."""
        if not self._saved:
            # The number that autograd gives to the next node grows with each operation before it saves anything.
            self._node = next_node()
            # Its kernels go to the stream of now, which need not be that of the operation after it.
            self._stream = self._backend.compute_stream()
        self._saved.append((weakref.ref(storage), owner))

    @property
    def over(self) -> bool:
        """Whether it has saved something, and what saves now is another operation."""
        return bool(self._saved) and next_node() != self._node

    def end(self) -> list[tuple[SavedStorage, Owner]]:
        """It is over: one event marks all that it has saved as complete. Returns what of it still lives."""
        saved, self._saved = self._saved, []
        living = [(storage, owner) for reference, owner in saved if (storage := reference()) is not None]
        if living:
            ready = self._stream.record_event()
            for storage, _ in living:
                storage.complete(ready)
        return living
