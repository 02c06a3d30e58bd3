"""Train models that do not fit: activations move to host memory and back, beside compute."""

from offload.activations.activation_set import OffloadState, OffloadStateError
from offload.activations.context import OffloadContext, start_offload
from offload.activations.drop_in import ManualOffloadSynchronizer, get_cpu_offload_context
from offload.activations.stats import OffloadStats
from offload.activations.what_moves import mark_not_offload
from offload.base.find_layers import remove
from offload.device.cuda import CaptureError
from offload.host.page_locked import HostMemoryError
from offload.host.pool import empty_host_cache, reserve_host_memory
from offload.long_context import Undoable, chunked_cross_entropy, tile_mlp, use_chunked_loss
from offload.measuring.measure_link import measure_link, plan
from offload.measuring.profile_layers import profile_layers
from offload.observe.memory import MemoryMeter, memory_meter
from offload.observe.record import record_timeline
from offload.observe.timeline import Span, Timeline
from offload.offload_layers import OffloadedLayers, offload_layers
from offload.optimizer.stream import OptimizerStats, StreamedOptimizer, stream_optimizer
from offload.planning.plan import Plan
from offload.planning.profile import LayerProfile, Link, Profile
from offload.planning.recipes import RecipePlan, TrainingPlan
from offload.planning.simulate import simulate
from offload.planning.training_bytes import Recipe
from offload.prepare import prepare
from offload.prepared import PreparedTraining
from offload.recompute.costs import LayerPolicy, RegionProfile
from offload.recompute.policies import Policy
from offload.schedule.schedule import Move, Point, Schedule
from offload.weights.streamed import StreamedWeights, WeightStats, stream_weights

__version__ = "0.1.0"

__all__ = [
    "CaptureError", "HostMemoryError", "LayerPolicy", "LayerProfile", "Link", "ManualOffloadSynchronizer",
    "MemoryMeter", "Move", "OffloadContext", "OffloadState", "OffloadStateError", "OffloadStats", "OffloadedLayers",
    "OptimizerStats", "Plan", "Point", "Policy", "PreparedTraining", "Profile", "Recipe", "RecipePlan", "RegionProfile",
    "Schedule", "Span", "StreamedOptimizer", "StreamedWeights", "Timeline", "TrainingPlan", "Undoable", "WeightStats",
    "chunked_cross_entropy", "empty_host_cache", "get_cpu_offload_context", "mark_not_offload", "measure_link",
    "memory_meter", "offload_layers", "plan", "prepare", "profile_layers", "record_timeline", "remove",
    "reserve_host_memory", "simulate", "start_offload", "stream_optimizer", "stream_weights", "tile_mlp",
    "use_chunked_loss",
]  # fmt: skip
