"""Train models that do not fit: activations move to host memory and back, beside compute."""

from offload.context import OffloadContext, get_cpu_offload_context, start_offload
from offload.exclusions import mark_not_offload
from offload.manual import ManualOffloadSynchronizer
from offload.schedule import Move, Point, Schedule
from offload.states import OffloadState, OffloadStateError
from offload.stats import OffloadStats

__all__ = [
    "ManualOffloadSynchronizer",
    "Move",
    "OffloadContext",
    "OffloadState",
    "OffloadStateError",
    "OffloadStats",
    "Point",
    "Schedule",
    "get_cpu_offload_context",
    "mark_not_offload",
    "start_offload",
]
