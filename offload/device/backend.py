"""The streams, events and copies of one device: those of any accelerator that PyTorch knows.

:mod:`offload.device.cuda` does some of it better. On a machine without an accelerator, :mod:`offload.device.cpu` copies
for real in worker threads, so that a missing wait gives wrong numbers there as it would on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol, cast

import torch

from offload.base.tensors import whole
from offload.base.torch_private import owners_of


class Event(Protocol):
    """A mark in a stream; ``torch.Event`` on an accelerator."""

    def query(self) -> bool:
        """Whether the work before the mark is done."""

    def synchronize(self) -> None:
        """Block the calling thread until it is."""


class Stream(Protocol):
    """A queue of device work; ``torch.Stream`` on an accelerator."""

    def record_event(self) -> Event:
        """Mark the work queued so far."""

    # Any, as a stream takes events of its own kind only, while who holds a stream knows no kinds.
    def wait_event(self, event: Any, /) -> None:
        """Let work queued from now on start after ``event``."""


class Wait(Enum):
    """The waits of one stream for another, for offloaded activations, and what would go wrong without each.

    Tests drop them one by one and expect wrong gradients.
    """

    READY = "a copy to the host reads a tensor before compute has written it"
    HOST_BUFFER = "a copy to the host overwrites a host buffer that is still being read"
    RELEASE = "compute reuses device memory that is still being copied to the host"
    LANDING = "a reload writes device memory that compute still uses, or reads an unfinished host copy"
    RELOADED = "backward reads a tensor before its reload has finished"
    UNREAD = "compute reuses the memory of a reload that nobody read while it is still being written"


class PageLockError(RuntimeError):
    """Host memory could not be page-locked; the text is what the driver says."""


class Backend:
    """Streams, events and memory of one device, as ``torch.accelerator`` offers them."""

    locks_any_memory = False  # whether `page_lock` takes what the library has mapped; else PyTorch allocates it

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.poison = False  # overwrite device memory when its last owner lets it go, as reuse would. For tests
        self.compute_stream_id: Callable[[], object] = self.compute_stream  # tells it from others, quickly

    @functools.cached_property
    def copy_streams(self) -> tuple[Stream, Stream]:
        """The d2h and the h2d stream that all contexts of this device share, as the link is shared."""
        return self.new_stream("d2h"), self.new_stream("h2d")

    @functools.cached_property
    def weight_stream(self) -> Stream:
        """The h2d stream of weights: their loads wait for slots, and activations must not wait behind them."""
        return self.new_stream("h2d")

    @functools.cached_property
    def state_streams(self) -> tuple[Stream, Stream]:
        """The d2h and the h2d stream of optimizer state: its copies wait for slots and steps, and others must not."""
        return self.new_stream("d2h"), self.new_stream("h2d")

    def new_stream(self, name: str) -> Stream:
        """A queue of its own."""
        return torch.Stream(device=self.device)

    def running_on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside the block, operations go to ``stream``, which is the compute stream there."""
        return cast("torch.Stream", stream)

    def compute_stream(self) -> Stream:
        """The stream that the caller's operations go to."""
        return torch.accelerator.current_stream(self.device.index)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between device and page-locked host memory; the caller keeps both until it has run."""
        with cast("torch.Stream", stream):
            target.copy_(source, non_blocking=True)

    def to_host(self, stream: Stream, pieces: Sequence[torch.Tensor], memory: torch.UntypedStorage) -> None:
        """Queue the copy of device ``memory`` into host memory, uint8 ``pieces`` in order."""
        for piece, source in zip(pieces, _in_pieces(memory, pieces), strict=True):
            self.copy(stream, piece, source)

    def to_device(self, stream: Stream, memory: torch.UntypedStorage, pieces: Sequence[torch.Tensor]) -> None:
        """Queue the copy of host memory, uint8 ``pieces`` in order, into device ``memory``."""
        for piece, target in zip(pieces, _in_pieces(memory, pieces), strict=True):
            self.copy(stream, target, piece)

    def page_lock(self, address: int, nbytes: int) -> None:
        """Page-lock a range of host memory, if copies need that; a :class:`PageLockError` leaves it as it was."""

    def page_unlock(self, address: int) -> None:
        """Undo :meth:`page_lock`, before the system gets the range back."""

    def collective(self, stream: Stream, start: Callable[[], Any]) -> None:
        """Queue what ``start`` queues on the current stream, and the collective that it returns, in order."""
        with cast("torch.Stream", stream):
            start().wait()  # lets this stream wait, not the host

    def wait(self, stream: Stream, event: Event, why: Enum) -> None:
        """Let ``stream`` wait for ``event``; ``why`` names the rule that needs it."""
        stream.wait_event(event)

    def give_way(self, stream: Stream) -> None:
        """Let copies of other streams run before those that ``stream`` gets next, if the device keeps one queue."""

    def wait_on_host(self, event: Event, why: Enum) -> None:
        """Block the calling thread until ``event``; ``why`` names the rule that needs it."""
        event.synchronize()

    @property
    def capturing(self) -> bool:
        """Whether the current stream's work is captured in a CUDA graph: events tell no time there."""
        return False

    def record_timed(self, stream: Stream) -> Event:
        """Mark the work queued so far on ``stream``, with an event that tells its time unless :attr:`capturing`."""
        if self.capturing:
            return stream.record_event()  # in a graph that is replayed later, a mark has no time
        event = torch.Event(self.device, enable_timing=True)
        event.record(cast("torch.Stream", stream))
        return event

    def elapsed_s(self, begin: Event, end: Event) -> float | None:
        """Seconds between two timed events, ``None`` as long as they are not known. Does not wait."""
        if self.capturing or not (begin.query() and end.query()):  # a query would break the capture
            return None
        return cast("torch.Event", begin).elapsed_time(cast("torch.Event", end)) * 1e-3

    def mark(self) -> Event:
        """The point that the compute stream reaches with what is queued so far."""
        return self.record_timed(self.compute_stream())

    def delay(self, seconds: float) -> None:
        """Keep the compute stream idle for so long. Nothing here, as PyTorch has no such call for every accelerator."""

    def seconds(self, marks: Iterable[tuple[Event, Event]]) -> list[float]:
        """From the first mark of each pair to the second; waits until the stream has reached them."""
        self.synchronize()  # else some marks would have no time yet
        return [self.elapsed_s(begin, end) or 0.0 for begin, end in marks]

    def synchronize(self) -> None:
        """Block the calling thread until all work queued so far, on any stream, is done or has failed."""
        torch.accelerator.synchronize(self.device)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory from the current stream's allocator, uint8 of shape ``[nbytes]``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def use_here(self, tensor: torch.Tensor) -> None:
        """Once ``tensor`` is freed, let its memory wait for the current stream before another stream reuses it."""

    def end_useless_copy(self, copied: Event) -> None:
        """Device memory is freed whose copy to the host nobody will read: the copy may read what is written next."""

    def discard(self, flat: torch.Tensor) -> None:
        """Called when the library gives up ``flat``; poisons it if nobody else holds its storage."""
        if self.poison and owners_of(flat.untyped_storage()) == 1:
            whole(flat.untyped_storage()).fill_(0xFF)


def _in_pieces(memory: torch.UntypedStorage, pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Device memory in pieces of the same lengths: most buffers have one, and to split takes longer than to copy."""
    flat = whole(memory)
    return [flat] if len(pieces) == 1 else flat.split([len(piece) for piece in pieces])
