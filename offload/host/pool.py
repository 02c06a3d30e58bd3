"""The pool: page-locked host memory for offloaded activations, reused from step to step.

A request takes a free buffer of its size; else a buffer is carved from free ranges, in several pieces where no single
range is large enough; only what is missing then is newly pinned. So fragmentation never makes the pool grow. Where the
system has refused to pin more, it is not asked again until somebody reserves or frees memory: asking takes time.

A buffer that is given back carries the event after which it may be written again: the next copy waits for the event.
A CUDA graph copies to and from the addresses that it captured whenever it is replayed, so what a capture takes is the
graph's own for good.

Whoever gives a buffer back forgets it first: an interrupt (Ctrl-C) can lose a buffer, and never hands it out twice.
"""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from offload.base.checks import format_bytes, format_s, parse_bytes
from offload.base.tensors import aligned
from offload.device.backend import Backend, Event
from offload.device.cuda import CaptureError, current_capture
from offload.device.select import get_backend
from offload.host.page_locked import HostMemoryError, available_bytes, check_room, forget_on_fork, page_locked


class Range:
    """Consecutive bytes of one slab."""

    __slots__ = ("nbytes", "slab", "start")

    # No dataclass, whose generated __init__ is in no file: the compiler would compile it.
    def __init__(self, slab: torch.Tensor, start: int, nbytes: int) -> None:
        self.slab = slab
        self.start = start
        self.nbytes = nbytes

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.nbytes

    def overlaps(self, other: Range) -> bool:
        """Whether another range of the same slab has a byte of it."""
        return self.start < other.end and other.start < self.end


class HostBuffer:
    """Host memory for one storage: uint8 pieces, in order, and the events after which they may be written."""

    __slots__ = ("events", "graph", "nbytes", "pieces", "ranges")

    def __init__(self, nbytes: int, ranges: Sequence[Range]) -> None:
        self.nbytes = nbytes
        self.graph: Ready | None = None  # what belongs to the CUDA graph that copies to and from it, if any
        self.ranges = ranges
        self.events: tuple[Event, ...] = ()
        self.pieces = [piece.slab[piece.start : piece.end] for piece in ranges]
        padding = sum(piece.nbytes for piece in ranges) - nbytes
        self.pieces[-1] = self.pieces[-1][: ranges[-1].nbytes - padding]


Ready = defaultdict[int, deque[HostBuffer]]  # buffers to hand out again as they are, by size


def gaps(slabs: Iterable[torch.Tensor], covered: Iterable[Range]) -> list[Range]:
    """The ranges of the slabs that are not covered."""
    in_slab: defaultdict[int, list[Range]] = defaultdict(list)
    for piece in covered:
        in_slab[id(piece.slab)].append(piece)
    found = []
    for slab in slabs:
        start = 0
        for piece in [*sorted(in_slab[id(slab)], key=lambda piece: piece.start), Range(slab, len(slab), 0)]:
            if piece.start > start:
                found.append(Range(slab, start, piece.start - start))
            start = piece.end
    return found


_logger = logging.getLogger(__name__)

PROGRESS_S = 2.0  # seconds between lines of the log while memory is pinned

BUFFER_ALIGNMENT_BYTES = 512
_NBYTES = operator.attrgetter("nbytes")
PAGE_BYTES = 4096
GROWTH = 64  # each newly pinned slab is at least a 64th (1.6%) of the pool, so that their number stays small
RESERVE_BYTES = 1 << 30  # what is pinned in advance comes in slabs of this size, so that each can be given back alone
RESERVE_THREADS = 4


class HostPool:
    """Buffers out of slabs that ``allocate`` pins, uint8 of shape ``[nbytes]``; see the module for the policy."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        # Reentrant: the garbage collector may run inside of the pool, and a finalizer take a buffer.
        self._lock = threading.RLock()
        # An append is atomic, so that finalizers and other threads give buffers back without the lock.
        self.ready: Ready = defaultdict(deque)
        self._slabs: list[torch.Tensor] = []
        self._buffers: list[HostBuffer] = []  # all that were made and not taken apart since, wherever they are
        self._free: list[Range] = []  # what no buffer covers
        self._copied: defaultdict[int, list[tuple[Range, Event]]] = defaultdict(list)
        """Of buffers taken apart, by the slab's id: the ranges that are writable after an event."""
        self._graphs: defaultdict[int, Ready] = defaultdict(lambda: defaultdict(deque))  # by capture
        self._max_bytes: int | None = None
        self._refusal: tuple[int, str] | None = None  # the least size that the system refused, and why

    @property
    def pinned_bytes(self) -> int:
        return sum(map(len, self._slabs))

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers that were taken, by graphs too, and not given back; right while nobody takes any."""
        given = sum(nbytes * len(buffers) for nbytes, buffers in list(self.ready.items()))
        return sum(buffer.nbytes for buffer in self._buffers) - given

    def room_bytes(self, max_bytes: int | None = None) -> int | None:
        """What can still be taken, within ``max_bytes`` and what the system has; ``None`` where nobody knows."""
        available = available_bytes()
        limits = [] if max_bytes is None else [max_bytes]
        if available is not None:
            limits.append(self.pinned_bytes + available)
        return max(0, min(limits) - self.used_bytes) if limits else None

    def take(self, nbytes: int, max_bytes: int | None = None) -> HostBuffer:
        """A buffer of ``nbytes`` bytes; its ``events`` are to be waited for before it is written.

        Raises a ``CaptureError`` if memory is missing while a CUDA graph is captured, and a ``HostMemoryError`` if the
        pool would grow beyond ``max_bytes``, or the system refused to pin more.
        """
        with self._lock:
            self._max_bytes = max_bytes
            capture = current_capture()
            if capture is None:
                return self._take(nbytes)
            graph = self._graphs[capture]
            if graph[nbytes]:
                return graph[nbytes].popleft()
            buffer = self._take(nbytes)
            buffer.graph, buffer.events = graph, ()  # what used it before is over: a capture begins idle
            return buffer

    def _take(self, nbytes: int) -> HostBuffer:
        ready = self.ready.get(nbytes)
        if ready:
            return ready.popleft()
        ranges = self._carve(aligned(max(nbytes, 1), BUFFER_ALIGNMENT_BYTES))
        buffer = HostBuffer(nbytes, ranges)
        buffer.events = self._events_of(ranges)
        self._buffers.append(buffer)
        return buffer

    def give(self, buffer: HostBuffer, *events: Event) -> None:
        """Take ``buffer`` back, which the caller has forgotten already, also in a finalizer and from any thread."""
        buffer.events = events  # the last copy's, behind which all earlier ones are done
        (self.ready if buffer.graph is None else buffer.graph)[buffer.nbytes].append(buffer)

    def take_whole(self, sizes: Sequence[int], max_bytes: int | None = None) -> list[HostBuffer]:
        """Buffers of one piece each, for tensors that the program reads; blocks until no copy uses their memory.

        What is missing is pinned at once. Raises as :meth:`take`; nothing has been taken then.
        """
        with self._lock:
            self._max_bytes = max_bytes
            self._reclaim()
            ranges: dict[int, Range] = {}
            missing: list[list[int]] = []  # numbers of the buffers in each new slab
            room = 0  # what the last of these can still take
            rounded = [aligned(max(size, 1), BUFFER_ALIGNMENT_BYTES) for size in sizes]
            for number in sorted(range(len(sizes)), key=rounded.__getitem__, reverse=True):
                size = rounded[number]
                if (piece := self._smallest(size)) is not None:
                    ranges[number] = self._cut(piece, size)
                    continue
                if room < size:
                    missing.append([])
                    room = max(RESERVE_BYTES, size)
                missing[-1].append(number)
                room -= size
            slabs = [aligned(sum(rounded[number] for number in numbers), PAGE_BYTES) for numbers in missing]
            if slabs:
                more = sum(slabs)
                limit = self.pinned_bytes + more if max_bytes is None else max_bytes
                fits = self.used_bytes + sum(rounded) <= limit < self.pinned_bytes + more
                if fits and self.trim(limit - more):  # what was idle in slabs that are too small
                    return self.take_whole(sizes, max_bytes)
                self._check_size(more)
                check_room(more)
                self._pin(slabs)
            for numbers, slab in zip(missing, self._slabs[len(self._slabs) - len(slabs) :], strict=True):
                for number in numbers:
                    [free] = [piece for piece in self._free if piece.slab is slab]
                    ranges[number] = self._cut(free, rounded[number])
            taken = [HostBuffer(size, [ranges[number]]) for number, size in enumerate(sizes)]
            events = self._events_of(ranges.values())
            self._buffers += taken
        for event in events:
            event.synchronize()
        return taken

    def _cut(self, piece: Range, size: int) -> Range:
        """Take the first bytes of a free range; the rest becomes the last of the free ranges."""
        self._free.remove(piece)
        if piece.nbytes > size:
            self._free.append(Range(piece.slab, piece.start + size, piece.nbytes - size))
        return Range(piece.slab, piece.start, size)

    def read(self, buffer: HostBuffer) -> None:
        """Say that a copy out of ``buffer`` is about to be queued."""
        if buffer.graph is None and current_capture() is not None:
            raise CaptureError(
                "backward is being captured, but its forward ran outside of a capture; capture both, in one graph "
                "or with torch.cuda.make_graphed_callables."
            )

    def reserve(self, nbytes: int) -> None:
        """Pin now what is missing for ``nbytes`` bytes in total; what was pinned before an error stays in the pool."""
        with self._lock:
            self._refusal = None
            missing = aligned(max(0, nbytes - self.pinned_bytes), PAGE_BYTES)
            if missing:
                self._pin([min(RESERVE_BYTES, missing - start) for start in range(0, missing, RESERVE_BYTES)])

    def trim(self, keep_bytes: int = 0) -> int:
        """Give slabs that hold no buffer back to the system, unless the pool has no more than ``keep_bytes``.

        Returns how many bytes that were. Waits for copies in flight.
        """
        with self._lock:
            self._refusal = None
            self._reclaim()
            for _, event in itertools.chain.from_iterable(self._copied.values()):
                event.synchronize()  # a copy may still run, and the system takes the pages at once
            self._copied.clear()
            idle: dict[int, int] = {}
            for piece in self._free:
                if piece.nbytes == len(piece.slab) and self.pinned_bytes - sum(idle.values()) > keep_bytes:
                    idle[id(piece.slab)] = piece.nbytes
            self._free = [piece for piece in self._free if id(piece.slab) not in idle]
            self._slabs = [slab for slab in self._slabs if id(slab) not in idle]
        return sum(idle.values())

    def _carve(self, size: int) -> list[Range]:
        """The smallest range that is large enough; as long as there is none, the largest: the pieces are to be few."""
        piece = self._smallest(size)
        if piece is None:
            self._reclaim()
            piece = self._smallest(size)
        if piece is None and (missing := size - sum(free.nbytes for free in self._free)) > 0:
            self._grow(missing)
        carved: list[Range] = []
        while size:
            piece = piece or self._smallest(size) or max(self._free, key=_NBYTES)
            carved.append(self._cut(piece, min(size, piece.nbytes)))
            size, piece = size - carved[-1].nbytes, None
        return carved

    def _events_of(self, ranges: Iterable[Range]) -> tuple[Event, ...]:
        """The events after which all of these may be written."""
        found = ((copied, event, piece) for piece in ranges for copied, event in self._copied.get(id(piece.slab), ()))
        return tuple(dict.fromkeys(event for copied, event, piece in found if copied.overlaps(piece)))

    def _smallest(self, size: int) -> Range | None:
        fitting = [piece for piece in self._free if piece.nbytes >= size]
        return min(fitting, key=_NBYTES, default=None)

    def _reclaim(self) -> None:
        """Take apart the buffers that are ready, so that their memory is free for buffers of other sizes."""
        idle: set[HostBuffer] = set()
        for buffers in list(self.ready.values()):
            while buffers:  # finalizers and other threads may append meanwhile
                idle.add(buffers.popleft())
        for buffer in idle:
            for piece in buffer.ranges if buffer.events else ():
                self._copied[id(piece.slab)] += [(piece, event) for event in buffer.events]
        self._buffers = [buffer for buffer in self._buffers if buffer not in idle]
        if current_capture() is None:  # no query is allowed in a capture
            for copied in self._copied.values():
                copied[:] = [(piece, event) for piece, event in copied if not event.query()]
        self._free = gaps(self._slabs, itertools.chain.from_iterable(buffer.ranges for buffer in self._buffers))

    def _grow(self, missing: int) -> None:
        _forbid_in_capture(missing)
        nbytes = aligned(missing, PAGE_BYTES)
        more = aligned(self.pinned_bytes // GROWTH, PAGE_BYTES)
        if self._max_bytes is None or self.pinned_bytes + more <= self._max_bytes:
            nbytes = max(nbytes, more)
        size = self._check_size(nbytes)
        if self._refusal is not None and size >= self._refusal[0]:
            raise HostMemoryError(self._refusal[1])
        try:
            self._pin([nbytes])
        except HostMemoryError as error:
            self._refusal = (size, str(error))
            raise

    def _check_size(self, nbytes: int) -> int:
        """The pool's size with ``nbytes`` more, unless the limit forbids it."""
        size = self.pinned_bytes + nbytes
        if self._max_bytes is not None and size > self._max_bytes:
            raise HostMemoryError(
                f"{format_bytes(nbytes)} of pinned host memory are missing beyond the pool's "
                f"{format_bytes(self.pinned_bytes)}, but max_host_bytes is {format_bytes(self._max_bytes)}; "
                "offload fewer layers or raise the limit."
            )
        return size

    def _pin(self, slabs: Sequence[int]) -> None:
        """Pin slabs of these sizes, several at a time, and append them in order."""
        missing = sum(slabs)
        _forbid_in_capture(missing)
        begin_s = said_s = time.perf_counter()
        with ThreadPoolExecutor(RESERVE_THREADS) as threads:
            # One alone in this thread, which holds the lock: a finalizer that runs meanwhile may take a buffer.
            allocated = (map if len(slabs) == 1 else threads.map)(self._allocate, slabs)
            for slab in allocated:  # an error cancels the rest
                self._slabs.append(slab)
                self._free.append(Range(slab, 0, len(slab)))
                if time.perf_counter() - said_s > PROGRESS_S:
                    said_s = time.perf_counter()
                    _logger.info("pinning host memory: the pool has %s so far", format_bytes(self.pinned_bytes))
        amounts = format_bytes(missing), format_s(time.perf_counter() - begin_s), format_bytes(self.pinned_bytes)
        _logger.info("pinned %s of host memory in %s; the pool has %s", *amounts)


def _forbid_in_capture(missing: int) -> None:
    if current_capture() is not None:
        raise CaptureError(
            f"{missing} bytes of pinned host memory are missing, and none can be added while a CUDA graph is being "
            "captured; run one step as a warm-up before the capture."
        )


_pools: dict[torch.device, HostPool] = {}


def get_host_pool(backend: Backend) -> HostPool:
    """The pool of the backend's device, one per process."""
    if backend.device not in _pools:

        def allocate(nbytes: int) -> torch.Tensor:
            memory = page_locked(nbytes, backend)
            # A forked child can use the CPU alone, and goes on there with what its parent had on the host.
            return memory if backend.device.type == "cpu" else forget_on_fork(memory)

        _pools.setdefault(backend.device, HostPool(allocate))  # another thread's, if it is first
    return _pools[backend.device]


def reserve_host_memory(nbytes: int | str, device: torch.device | str | int | None = None) -> None:
    """Pin host memory now, so that the first step does not have to.

    Args:
        nbytes: How much the device's pool should have in total, such as a plan's ``host_bytes``, or ``"40GiB"``.
        device: The device whose activations move; the current accelerator by default, and the CPU where there is none.

    Raises:
        HostMemoryError: The system has not that much left, or refused; what was pinned before remains usable.
    """
    pool = get_host_pool(get_backend(device))
    total = parse_bytes(nbytes, "nbytes")
    check_room(total - pool.pinned_bytes)  # the pool takes it in parts
    pool.reserve(total)


def empty_host_cache(device: torch.device | str | int | None = None) -> int:
    """Free the pinned memory of a device's pool that holds nothing now, and return how many bytes that were.

    Waits for copies in flight. Without a ``device``, the current accelerator's, and the CPU's where there is none.
    """
    return get_host_pool(get_backend(device)).trim()
