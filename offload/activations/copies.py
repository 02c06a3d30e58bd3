"""What a context copies with, and counts: its streams, its host memory, its stalls.

Compute stalls from the moment when it reaches a wait until the copies are done. So each wait records one event more on
the compute stream. Nobody waits for these events: their times are read when both have passed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields

import torch

from offload.activations.stats import OffloadStats
from offload.base import trace
from offload.base.checks import format_bytes, warn_caller
from offload.base.tensors import own_storage
from offload.device.backend import Backend, Event, Stream, Wait
from offload.device.cuda import CaptureError, is_capturing
from offload.host.page_locked import HostMemoryError
from offload.host.pool import HostBuffer, HostPool

WORTH_A_WARNING = 0.5  # so much of the copied bytes has freed nothing: the first layer's input is often less
NO_HOST_MEMORY = "no host memory"  # why a storage that did not fit on the host is kept, in `stats().skipped`
NAMED = 3  # operations in the warning
MOST_PENDING = 4096  # stalls whose times are not known yet. Later ones are not counted, so that memory is bounded


class CopyBatch:
    """Copies to the host that were queued one after the other, and the event after which all of them are done."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.event: Event | None = None  # `None` as long as copies are added


class Reload:
    """Copies to the device that were queued one after the other, the event after them, and who has waited for it.

    The device memory belongs to the compute stream ``stream``, which ``home`` tells from others.
    """

    def __init__(self, done: Event, stream: Stream, home: object) -> None:
        self.done = done
        self.stream = stream
        self.home = home
        self.awaited_by: object = None  # the stream that has waited for it last, told as `home` is


class Transfers:
    """The two copy streams of a context, the memory that they copy to, and the counts of :class:`OffloadStats`."""

    def __init__(self, backend: Backend, pool: HostPool, max_host_bytes: int | None = None) -> None:
        self.backend = backend
        self.pool = pool
        self.max_host_bytes = max_host_bytes  # the most that the device's pool may have when this context asks
        self.d2h_stream, self.h2d_stream = backend.copy_streams
        self.lock = threading.RLock()  # held while storages are reloaded: several threads may read what was saved
        self.offloaded_bytes = self.offloaded_tensors = self.offloaded_storages = self.reloaded_bytes = 0
        self.resident_bytes = self.peak_resident_bytes = self.late_reloads = 0
        self.skipped: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()
        self.stall_s = 0.0
        self._ready: Event | None = None  # what the d2h stream has waited for last
        self._batch: CopyBatch | None = None  # the copies to the host that were queued last and may go on
        self._batches = 0
        self._stalls: deque[tuple[Event, Event]] = deque()  # begin and end of each whose time is not known yet
        self._last_copied: Event | None = None
        self._collecting = threading.Lock()
        self._warned_of_waste = self._warned_of_host = False

    def stats(self) -> OffloadStats:
        self._collect_stalls()
        counts = {item.name: getattr(self, item.name) for item in fields(OffloadStats) if item.name in vars(self)}
        counts |= {"skipped": dict(self.skipped), "wasted": dict(self.wasted)}
        return OffloadStats(**counts, pinned_bytes=self.pool.pinned_bytes, wasted_bytes=self.wasted.total())

    def begin_round(self) -> None:
        """A round of layers begins: look back at the earlier ones."""
        self._collect_stalls()
        if self._warned_of_waste or self.wasted.total() <= WORTH_A_WARNING * self.offloaded_bytes:
            return
        self._warned_of_waste = True
        named = [f"{name} ({format_bytes(nbytes)})" for name, nbytes in self.wasted.most_common(NAMED)]
        more = ", ..." if len(self.wasted) > NAMED else ""
        warn_caller(
            f"{format_bytes(self.wasted.total())} of the {format_bytes(self.offloaded_bytes)} that were copied to the "
            "host so far freed no device memory, because something else holds the tensors, by the operation that made "
            f"them: {', '.join(named)}{more}. Drop them before the layer is released (outputs collected in a list or "
            "by a hook, tensors stored on a module, a variable that wants `del`), or pass tensors that must be kept to "
            "mark_not_offload; see stats().wasted."
        )

    def hold(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def waste(self, nbytes: int, maker: type) -> None:
        """Bytes were copied, and freed no device memory; ``maker`` is the type of the node that made the tensor."""
        self.wasted[operation_name(maker)] += nbytes

    def wait_for_copies(self, compute_stream: Stream, copied: Event, why: Wait) -> None:
        """Let compute wait for copies, on the device, and count how long it stalls: not inside of a CUDA graph."""
        backend = self.backend
        # The first wait for an event is the one that stalls.
        if copied is not self._last_copied and not backend.capturing:
            self._last_copied = copied
            if len(self._stalls) < MOST_PENDING and not copied.query():
                self._stalls.append((backend.record_timed(compute_stream), copied))
        backend.wait(compute_stream, copied, why)

    def _collect_stalls(self) -> None:
        """Read the times of the waits that compute has passed by now. Does not wait."""
        with self._collecting:
            while self._stalls:
                stall_s = self.backend.elapsed_s(*self._stalls[0])
                if stall_s is None:
                    break
                self._stalls.popleft()
                self.stall_s += max(0.0, stall_s)

    def join(self) -> None:
        """Let the compute stream wait for both copy streams if a CUDA graph is captured: it must join what it forks."""
        for stream in (self.d2h_stream, self.h2d_stream):
            if is_capturing(stream):
                self.backend.compute_stream().wait_event(stream.record_event())

    def to_host(
        self, memory: torch.UntypedStorage, nbytes: int, ready: Event, layer: int
    ) -> tuple[CopyBatch, HostBuffer] | None:
        """Queue the copy of device ``memory``, written when ``ready`` is reached; ``None`` where it is kept."""
        try:
            host = self.pool.take(nbytes, self.max_host_bytes)
        except CaptureError:
            self.join()  # else ending the capture fails as well, and hides what this error says
            raise
        except HostMemoryError as error:
            # Pinning can fail: containers have limits, and machines are full. A step that has begun should still end.
            if not self._warned_of_host:
                self._warned_of_host = True
                warn_caller(f"{error} Tensors that do not fit are kept on the device.")
            return None
        wait, stream = self.backend.wait, self.d2h_stream
        if ready is not self._ready:
            # One wait holds for all that comes after it on the stream, and storages of one operation share an event.
            wait(stream, ready, Wait.READY)
            self._ready = ready
        for event in host.events:
            # The buffer's last user may still read it, or write it.
            wait(stream, event, Wait.HOST_BUFFER)
        try:
            with trace.mark("d2h", layer):
                self.backend.to_host(stream, host.pieces, memory)
        except BaseException:
            self.pool.give(host, stream.record_event())  # a part of the copy may have been queued
            raise
        if self._batch is None:
            self._batches += 1
            self._batch = CopyBatch(self._batches)
        return self._batch, host

    def spares_device(self, nbytes: int) -> bool:
        """Whether so much is to be lent where the device is short of memory.

        A budget of the CPU has no byte to spare, and copies are cheap. On an accelerator they are not, and plans leave
        its allocator some bytes.
        """
        within = self.max_host_bytes is None or self.pool.used_bytes + nbytes <= self.max_host_bytes
        return self.backend.device.type == "cpu" and within

    @contextmanager
    def lend(self, sizes: Sequence[int]) -> Iterator[list[torch.UntypedStorage]]:
        """Host memory of these sizes, pinned as far as there is so much: else copies take ten times as long, and more.

        A pool that may not grow has what it has lent before, less what layers have taken for their inputs since.
        """
        buffers: dict[int, HostBuffer] = {}
        try:
            self._borrow([*range(len(sizes))], sizes, buffers)
            for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
                if number not in buffers:
                    self._borrow([number], sizes, buffers)
            memories = {number: own_storage(one.pieces[0]).untyped_storage() for number, one in buffers.items()}
            yield [memories.get(number) or torch.UntypedStorage(size) for number, size in enumerate(sizes)]
        finally:
            for buffer in buffers.values():
                self.pool.give(buffer)

    def _borrow(self, numbers: Sequence[int], sizes: Sequence[int], buffers: dict[int, HostBuffer]) -> None:
        """Add pinned memory for these of the ``sizes``, or for none of them."""
        # Not around the block that has the memory: an error there would hold itself, and tensors, since Python 3.12.
        with suppress(HostMemoryError):
            taken = self.pool.take_whole([sizes[number] for number in numbers], self.max_host_bytes)
            buffers.update(zip(numbers, taken, strict=True))

    def end_batch(self) -> None:
        """Mark the copies to the host that were queued since this was called last, if there are any."""
        if self._batch is not None:
            self.done(self._batch)

    def done(self, batch: CopyBatch) -> Event:
        """The event after which the copies of a batch are over; no copy is added to the batch from now on."""
        if batch is self._batch:
            self._batch = None
        if batch.event is None:  # also if an interrupt came before it was recorded: a later one is as good
            batch.event = self.backend.record_timed(self.d2h_stream)
        return batch.event

    def to_device(self, memory: torch.UntypedStorage, host: HostBuffer, layer: int) -> None:
        """Queue the copy of ``host`` into device ``memory``, which the h2d stream has waited for."""
        self.pool.read(host)
        with trace.mark("h2d", layer):
            self.backend.to_device(self.h2d_stream, memory, host.pieces)


def operation_name(maker: type) -> str:
    """``"Addmm"`` for ``AddmmBackward0``; ``"leaf"`` for tensors that no operation has made, such as inputs."""
    return "leaf" if maker is type(None) else maker.__name__.rstrip("0123456789").removesuffix("Backward")
