"""Train models that do not fit: activations move to host memory and back, beside compute."""

from offload.compiler import leave_to_interpreter
from offload.context import OffloadContext, start_offload
from offload.cpu_offload import get_cpu_offload_context
from offload.exclusions import mark_not_offload
from offload.graphs import CaptureError
from offload.host_memory import HostMemory, empty_host_cache, reserve_host_memory
from offload.layers import OffloadedLayers, offload_layers
from offload.link import Link
from offload.manual import ManualOffloadSynchronizer
from offload.measure import measure_link, profile_layers
from offload.memory import MemoryMeter, memory_meter
from offload.pinned import HostMemoryError
from offload.pipeline_schedule import plan_pipeline
from offload.plan import Plan, plan
from offload.points import Move, Point
from offload.profile import LayerProfile, Profile
from offload.record import record_timeline
from offload.schedule import Schedule
from offload.simulate import simulate
from offload.spans import Span
from offload.states import OffloadState, OffloadStateError
from offload.stats import OffloadStats
from offload.timeline import Timeline
from offload.weight_stats import WeightStats
from offload.weights import StreamedWeights, stream_weights

__version__ = "0.1.0"

Schedule.derive = plan_pipeline

leave_to_interpreter(__name__)

__all__ = [
    "CaptureError",
    "HostMemory",
    "HostMemoryError",
    "LayerProfile",
    "Link",
    "ManualOffloadSynchronizer",
    "MemoryMeter",
    "Move",
    "OffloadContext",
    "OffloadState",
    "OffloadStateError",
    "OffloadStats",
    "OffloadedLayers",
    "Plan",
    "Point",
    "Profile",
    "Schedule",
    "Span",
    "StreamedWeights",
    "Timeline",
    "WeightStats",
    "empty_host_cache",
    "get_cpu_offload_context",
    "mark_not_offload",
    "measure_link",
    "memory_meter",
    "offload_layers",
    "plan",
    "profile_layers",
    "record_timeline",
    "reserve_host_memory",
    "simulate",
    "start_offload",
    "stream_weights",
]
