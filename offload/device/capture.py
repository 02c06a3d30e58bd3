"""CUDA graphs under capture: which one the current stream is part of, and when a captured graph is gone.

Note:
    CUDA lets a graph hold a user object, whose destructor is called when the graph and everything instantiated from it
    are destroyed: on a thread of the driver's that must not take Python's lock, because whoever destroys the graph may
    hold it. So the destructor is ``sem_post`` of the C library, and who wants to know looks at the semaphore.
    Source: CUDA driver API, "Graph Management", cuUserObjectCreate and cuGraphRetainUserObject.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, cast

import torch

from offload.device import cuda
from offload.device.backend import Stream

_NO_DESTRUCTOR_SYNC = 1
_GRAPH_TAKES_OWNERSHIP = 1

_semaphores: list[ctypes.Array[ctypes.c_char]] = []


class CaptureError(RuntimeError):
    """A graph cannot be captured now; the message says what to do first."""


class Capture(NamedTuple):
    """A capture that is under way."""

    id: int
    graph: int  # address of the `CUgraph` under construction


def current_capture() -> Capture | None:
    """The CUDA graph capture that the current stream is part of, if any."""
    if not _capturing():
        return None
    status, identity, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    answers = (ctypes.byref(answer) for answer in (status, identity, graph))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(cuda.driver().cuStreamGetCaptureInfo_v2(stream, *answers, None, None))
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
        # Never freed, 64 bytes a graph: an interrupt may lose this object, and the driver posts all the same.
        _semaphores.append(self._destroyed)
        libc = ctypes.CDLL(None)
        libc.sem_init(self._destroyed, 0, 0)
        user_object = ctypes.c_void_p()
        made, call = ctypes.byref(user_object), libc.sem_post
        _check(cuda.driver().cuUserObjectCreate(made, self._destroyed, call, 1, _NO_DESTRUCTOR_SYNC))
        graph = ctypes.c_void_p(capture.graph)
        _check(cuda.driver().cuGraphRetainUserObject(graph, user_object, 1, _GRAPH_TAKES_OWNERSHIP))

    @property
    def over(self) -> bool:
        """Whether the graph and all its instances are destroyed."""
        posts = ctypes.c_int()
        ctypes.CDLL(None).sem_getvalue(self._destroyed, ctypes.byref(posts))
        return posts.value > 0


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _check(error: int) -> None:
    if error:
        raise CaptureError(f"the CUDA driver refused a call on the graph under capture with error {error}")
