"""The pool: page-locked host memory for activations that travel, reused from step to step.

The pool's size follows what is on the host: a request takes a free buffer of its size; else it
is carved from free ranges, in several pieces where no single range is large enough; only what is
missing then is newly pinned. So fragmentation never makes the pool grow. Where the system has refused
to pin more, it is not asked again until somebody reserves or frees memory: asking takes time.

A buffer that comes back carries the event after which it may be written again. Nobody
waits for it until the next copy into the buffer does, on the device.

Note:
    An interrupt (Ctrl-C) can come after any call, between a hand that gives and one that takes. So a giver forgets
    before it gives: what is lost on the way is lost for good, but never handed out twice. That is no leak, because
    a buffer counts only as long as somebody holds it: when memory is missing, whatever no buffer covers is free.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import torch

from offload.base.units import format_bytes
from offload.device.backend import Backend, Event
from offload.device.capture import Capture, CaptureError, current_capture
from offload.host.buffers import Arena, HostBuffer, Range, gaps, held_beside, joined
from offload.host.page_locked import HostMemoryError, forget_on_fork, page_locked

ALIGNMENT_BYTES = 512
PAGE_BYTES = 4096
GROWTH = 64
"""Each newly pinned slab is at least a 64th (1.6%) of the pool, so that their number stays small."""
RESERVE_BYTES = 1 << 30
"""What is pinned in advance comes in slabs of this size, so that each can be given back alone."""
RESERVE_THREADS = 4


class HostPool:
    """Buffers out of slabs that ``allocate`` pins; see the module for the policy.

    Args:
        allocate: Gives page-locked memory, uint8 of shape ``[nbytes]``.
        synchronize: Blocks until no copy runs; asked only after an interrupt has lost a buffer.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], synchronize: Callable[[], None] = lambda: None) -> None:
        self._allocate = allocate
        self._synchronize = synchronize
        # Reentrant: the garbage collector may run inside of the pool, and a finalizer take a buffer.
        self._lock = threading.RLock()
        # Its append is atomic, so that finalizers and other threads give buffers back without the lock.
        self.returned: deque[HostBuffer] = deque()
        self._ready: defaultdict[int, deque[HostBuffer]] = defaultdict(deque)
        """Buffers to hand out again as they are, by size."""
        self._free: list[Range] = []
        self._slabs: list[torch.Tensor] = []
        self._buffers: list[HostBuffer] = []
        """All that were made out of ranges and not merged since, wherever they are."""
        self._arenas: dict[int, Arena] = {}
        self._max_bytes: int | None = None
        self._refusal: tuple[int, str] | None = None
        """The least size of the pool that the system did not let it have, and why."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(map(len, self._slabs))

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers that were taken and not given back; what a graph holds counts as taken."""
        with self._lock:
            given = [*self.returned, *itertools.chain.from_iterable(self._ready.values())]
            return sum(buffer.nbytes for buffer in self._buffers) - sum(buffer.nbytes for buffer in given)

    def take(self, nbytes: int, max_bytes: int | None = None) -> HostBuffer:
        """A buffer of ``nbytes`` bytes; its ``events`` are to be waited for before it is written.

        Args:
            nbytes: Its size.
            max_bytes: Do not let the pool grow beyond this size.

        Raises:
            CaptureError: A CUDA graph is being captured and the pool has too little pinned memory.
            HostMemoryError: The pool would grow beyond ``max_bytes``, or the system refused to pin more.
        """
        with self._lock:
            self._max_bytes = max_bytes
            if self.returned or self._arenas:
                self._collect()
            capture = current_capture()
            return self._take(nbytes) if capture is None else self._take_for(capture, nbytes)

    def _take(self, nbytes: int) -> HostBuffer:
        ready = self._ready.get(nbytes)
        if ready:
            return ready.popleft()
        buffer = HostBuffer(nbytes, self._carve(_round_up(max(nbytes, 1), ALIGNMENT_BYTES)))
        self._buffers.append(buffer)
        return buffer

    def _take_for(self, capture: Capture, nbytes: int) -> HostBuffer:
        arena = self._arenas.setdefault(capture.id, Arena())
        arena.hold(capture)
        buffer = arena.take(nbytes)
        if buffer is None:
            buffer = self._take(nbytes)
            arena.add(buffer)
        return buffer

    def give(self, buffer: HostBuffer, event: Event) -> None:
        """Take ``buffer`` back, which the caller has forgotten already; it may be written again after ``event``.

        Safe in finalizers and from any thread.
        """
        buffer.events = (event,)  # the last copy's, behind which all earlier ones are done
        if buffer.arena is not None:
            buffer.arena.give(buffer)
        elif buffer.pooled:
            self.returned.append(buffer)

    def read(self, buffer: HostBuffer) -> None:
        """Say that a copy out of ``buffer`` is about to be queued; inside a capture, the graph keeps it.

        Raises:
            CaptureError: A capture would read what was copied to the host outside of any capture.
        """
        capture = current_capture()
        if capture is None:
            return
        if buffer.arena is None:
            raise CaptureError(
                "backward is being captured, but its forward ran outside of a capture; capture both, in one graph or "
                "with torch.cuda.make_graphed_callables."
            )
        buffer.arena.hold(capture)

    def reserve(self, nbytes: int) -> None:
        """Pin now what is missing for ``nbytes`` bytes in total.

        Raises:
            CaptureError: A CUDA graph is being captured.
            HostMemoryError: The system refused; what was pinned before that stays in the pool.
        """
        with self._lock:
            self._refusal = None
            missing = _round_up(max(0, nbytes - self.pinned_bytes), PAGE_BYTES)
            slabs = [min(RESERVE_BYTES, missing - start) for start in range(0, missing, RESERVE_BYTES)]
            if not slabs:
                return
            _forbid_in_capture(missing)
            with ThreadPoolExecutor(min(RESERVE_THREADS, len(slabs))) as threads:
                pinning = [threads.submit(self._allocate, size) for size in slabs]
                if wait(pinning, return_when=FIRST_EXCEPTION).not_done:
                    threads.shutdown(cancel_futures=True)
            tried = [future for future in pinning if not future.cancelled()]
            self._free += [self._add(future.result()) for future in tried if not future.exception()]
            for future in tried:
                future.result()

    def trim(self) -> int:
        """Give slabs that hold no buffer back to the system; returns their bytes. Waits for copies in flight."""
        with self._lock:
            self._refusal = None
            self._collect()
            self._merge_free()
            self._find_lost()
            idle = [piece for piece in self._free if piece.nbytes == len(piece.slab)]
            for piece in idle:
                for event in piece.events:
                    event.synchronize()  # a copy may still run, and the system takes the pages at once
            gone = {id(piece.slab) for piece in idle}
            self._free = [piece for piece in self._free if id(piece.slab) not in gone]
            self._slabs = [slab for slab in self._slabs if id(slab) not in gone]
        return sum(piece.nbytes for piece in idle)

    def _collect(self) -> None:
        for capture, arena in list(self._arenas.items()):
            if arena.over:
                del self._arenas[capture]  # first: what an interrupt loses here is found, but never given twice
                self.returned += (buffer.freed() for buffer in arena.buffers)
        while self.returned:
            buffer = self.returned.popleft()
            self._ready[buffer.nbytes].append(buffer)

    def _carve(self, size: int) -> list[Range]:
        self._merge_free()
        if sum(piece.nbytes for piece in self._free) < size:
            self._find_lost()
        fitting = [piece for piece in self._free if piece.nbytes >= size]
        if fitting:
            return [self._split(min(fitting, key=lambda piece: piece.nbytes), size)]
        missing = size - sum(piece.nbytes for piece in self._free)
        if missing > 0:
            self._free.append(self._grow(missing))
        carved = []
        for piece in sorted(self._free, key=lambda piece: piece.nbytes, reverse=True):
            carved.append(self._split(piece, min(size, piece.nbytes)))
            size -= carved[-1].nbytes
            if not size:
                return carved
        raise AssertionError("the pool grew by what was missing")

    def _split(self, piece: Range, size: int) -> Range:
        self._free.remove(piece)
        if piece.nbytes > size:
            self._free.append(Range(piece.slab, piece.start + size, piece.nbytes - size, piece.events))
        return Range(piece.slab, piece.start, size, piece.events)

    def _grow(self, missing: int) -> Range:
        _forbid_in_capture(missing)
        nbytes = _round_up(max(missing, self.pinned_bytes // GROWTH), PAGE_BYTES)
        if self._max_bytes is not None and self.pinned_bytes + nbytes > self._max_bytes:
            nbytes = _round_up(missing, PAGE_BYTES)
            if self.pinned_bytes + nbytes > self._max_bytes:
                raise HostMemoryError(
                    f"{format_bytes(nbytes)} of pinned host memory are missing beyond the pool's "
                    f"{format_bytes(self.pinned_bytes)}, but max_host_bytes is {format_bytes(self._max_bytes)}; "
                    "offload fewer layers or raise the limit."
                )
        if self._refusal is not None and self.pinned_bytes + nbytes >= self._refusal[0]:
            raise HostMemoryError(self._refusal[1])
        try:
            return self._add(self._allocate(nbytes))
        except HostMemoryError as error:
            self._refusal = (self.pinned_bytes + nbytes, str(error))
            raise

    def _add(self, slab: torch.Tensor) -> Range:
        self._slabs.append(slab)
        return Range(slab, 0, len(slab))

    def _merge_free(self) -> None:
        """Turn all free buffers back into ranges, adjacent ones into one."""
        empty: defaultdict[int, deque[HostBuffer]] = defaultdict(deque)
        # Taken away from both first: an interrupt half-way loses memory, but leaves none in two places.
        ready, self._ready = self._ready, empty
        pieces, self._free = self._free, []
        merged = set(itertools.chain.from_iterable(ready.values()))
        for buffer in merged:
            pieces += [Range(piece.slab, piece.start, piece.nbytes, buffer.events) for piece in buffer.ranges]
        self._buffers = [buffer for buffer in self._buffers if buffer not in merged]
        self._free = joined(pieces)

    def _find_lost(self) -> None:
        """Make free what neither a buffer nor a free range covers: an interrupt has lost it."""
        self._buffers = list(itertools.compress(self._buffers, held_beside(self._buffers, holders=0)))
        covered = itertools.chain(self._free, *(buffer.ranges for buffer in self._buffers))
        lost = gaps(self._slabs, joined([Range(piece.slab, piece.start, piece.nbytes) for piece in covered]))
        if lost and current_capture() is None:
            self._synchronize()  # a copy may still run there, and its event is lost too
            self._free = joined([*self._free, *lost])


def _forbid_in_capture(missing: int) -> None:
    if current_capture() is not None:
        raise CaptureError(
            f"{missing} bytes of pinned host memory are missing, and none can be added while a CUDA graph is being "
            "captured; run one step as a warm-up before the capture."
        )


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


_pools: dict[torch.device, HostPool] = {}


def get_host_pool(backend: Backend) -> HostPool:
    """The pool of the backend's device, one per process."""
    if backend.device not in _pools:

        def allocate(nbytes: int) -> torch.Tensor:
            memory = page_locked(nbytes, backend)
            # A forked child can use the CPU alone, and goes on there with what its parent had on the host.
            return memory if backend.device.type == "cpu" else forget_on_fork(memory)

        _pools[backend.device] = HostPool(allocate, backend.synchronize)
    return _pools[backend.device]
