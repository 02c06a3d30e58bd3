"""Host buffers inside CUDA graphs.

Copies and events are device work, so a graph holds them like kernels. What needs care is memory: a graph copies
to and from the addresses that it captured, for as long as it can be replayed. So buffers that a capture takes
from the pool form an *arena* of that graph, and return to the pool when the graph is gone.

Note:
    How to learn that a graph is gone: CUDA lets a graph hold a user object, and calls the object's destructor
    when the graph and everything instantiated from it have been destroyed. The call comes on a thread of the
    driver's that must not take Python's lock, because whoever destroys the graph may hold it. So the destructor is
    ``sem_post`` of the C library, and the pool looks at the semaphore when it next needs memory.
    Source: CUDA driver API, "Graph Management", cuUserObjectCreate and cuGraphRetainUserObject.
"""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from offload.device.backend import Stream

if TYPE_CHECKING:
    from offload.host.pool import HostBuffer

_NO_DESTRUCTOR_SYNC = 1
_GRAPH_TAKES_OWNERSHIP = 1


class CaptureError(RuntimeError):
    """A graph cannot be captured now; the message says what to do first."""


class Capture(NamedTuple):
    """A capture that is under way."""

    id: int
    graph: int
    """Address of the ``CUgraph`` under construction."""


def current_capture() -> Capture | None:
    """The CUDA graph capture that the current stream is part of, if any."""
    if not _capturing():
        return None
    status, identity, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    _check(
        _driver().cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ctypes.byref(status),
            ctypes.byref(identity),
            ctypes.byref(graph),
            None,
            None,
        )
    )
    return Capture(identity.value, graph.value or 0)


def is_capturing(stream: Stream) -> bool:
    """Whether ``stream`` is part of a CUDA graph capture."""
    if not _capturing():
        return False
    with cast("torch.Stream", stream):
        return _capturing()


class GraphLife:
    """Tells when a graph, captured now, is gone."""

    def __init__(self, capture: Capture) -> None:
        self._destroyed = ctypes.create_string_buffer(64)
        libc = ctypes.CDLL(None)
        libc.sem_init(self._destroyed, 0, 0)
        user_object = ctypes.c_void_p()
        _check(
            _driver().cuUserObjectCreate(
                ctypes.byref(user_object), self._destroyed, libc.sem_post, 1, _NO_DESTRUCTOR_SYNC
            )
        )
        graph = ctypes.c_void_p(capture.graph)
        _check(_driver().cuGraphRetainUserObject(graph, user_object, 1, _GRAPH_TAKES_OWNERSHIP))

    @property
    def over(self) -> bool:
        """Whether the graph and all its instances are destroyed."""
        posts = ctypes.c_int()
        ctypes.CDLL(None).sem_getvalue(self._destroyed, ctypes.byref(posts))
        return posts.value > 0


class Arena:
    """The host buffers of one graph, or of a forward graph and the backward graph that reads them."""

    def __init__(self) -> None:
        self.buffers: list[HostBuffer] = []
        self._lives: dict[int, GraphLife] = {}
        self._ready: defaultdict[int, deque[HostBuffer]] = defaultdict(deque)

    def hold(self, capture: Capture) -> None:
        """The graph captured now uses the arena's buffers."""
        if capture.id not in self._lives:
            self._lives[capture.id] = GraphLife(capture)

    def take(self, nbytes: int) -> HostBuffer | None:
        """A buffer that the same capture has given back, to be written after its event."""
        ready = self._ready[nbytes]
        return ready.popleft() if ready else None

    def add(self, buffer: HostBuffer) -> None:
        """``buffer`` belongs to the graph from now on. What used it before is over: a capture begins idle."""
        buffer.arena = self
        buffer.events = ()
        self.buffers.append(buffer)

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back from its user; it stays the graph's."""
        self._ready[buffer.nbytes].append(buffer)

    @property
    def over(self) -> bool:
        """Whether all graphs are gone and nobody uses a buffer."""
        return sum(map(len, self._ready.values())) == len(self.buffers) and all(
            life.over for life in self._lives.values()
        )


def _capturing() -> bool:
    return torch.cuda.is_initialized() and bool(torch._C._cuda_isCurrentStreamCapturing())


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(error: int) -> None:
    if error:
        raise CaptureError(f"the CUDA driver refused a call on the graph under capture with error {error}")
