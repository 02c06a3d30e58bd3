"""CUDA graphs under capture: which one the current stream is part of."""

from __future__ import annotations

import ctypes
from typing import cast

import torch

from offload.device import cuda
from offload.device.backend import Stream


class CaptureError(RuntimeError):
    """A graph cannot be captured now; the message says what to do first."""


def current_capture() -> int | None:
    """The number of the CUDA graph capture that the current stream is part of, if any; no two have the same."""
    if not _capturing():
        return None
    status, identity = ctypes.c_int(), ctypes.c_uint64()
    answers, stream = map(ctypes.byref, (status, identity)), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = cuda.driver().cuStreamGetCaptureInfo_v2(stream, *answers, None, None, None)
    if error:
        raise CaptureError(f"the CUDA driver refused a call on the graph under capture with error {error}")
    return identity.value


def is_capturing(stream: Stream) -> bool:
    """Whether ``stream`` is part of a CUDA graph capture."""
    if not _capturing():
        return False
    with cast("torch.Stream", stream):
        return _capturing()


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
