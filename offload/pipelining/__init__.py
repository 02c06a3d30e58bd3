"""Offloading under ``torch.distributed.pipelining``: each rank derives its own schedule and drives it.

A wing: may import the spine and ``planning``. Imported by itself, as it needs ``torch.distributed``. Open
``engine.py`` first.
"""

from offload.pipelining.engine import PipelineOffload, attach, measure_shared_link
from offload.pipelining.pipeline_regions import RegionPlan, plan_regions
from offload.pipelining.pipeline_simulation import PipelineStep, simulate_pipeline
from offload.pipelining.shared_link import SharedLink
from offload.pipelining.stage_plan import PipelinePlan, plan_pipeline
from offload.pipelining.stage_profile import StageProfile

__all__ = [
    "PipelineOffload",
    "PipelinePlan",
    "PipelineStep",
    "RegionPlan",
    "SharedLink",
    "StageProfile",
    "attach",
    "measure_shared_link",
    "plan_pipeline",
    "plan_regions",
    "simulate_pipeline",
]
