"""Offloading under ``torch.distributed.pipelining``: each rank derives its own schedule and drives it.

A wing: may import the spine and ``planning``. Imported by itself, as it needs ``torch.distributed``. Open
``engine.py`` first.
"""

from offload.pipelining.engine import PipelineOffload, attach
from offload.pipelining.plan import PipelinePlan, plan_pipeline
from offload.pipelining.stage_profile import StageProfile

__all__ = [
    "PipelineOffload",
    "PipelinePlan",
    "StageProfile",
    "attach",
    "plan_pipeline",
]
