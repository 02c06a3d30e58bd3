"""Offloading under ``torch.distributed.pipelining``: each rank derives its own schedule and drives it.

A wing: may import the spine and ``planning``. Imported by itself, as it needs ``torch.distributed``. Open
``engine.py`` first.
"""

from offload.pipelining.engine import (
    PipelineOffload,
    PipelinePlan,
    StageProfile,
    attach,
    measure_shared_link,
    plan_pipeline,
)

__all__ = ["PipelineOffload", "PipelinePlan", "StageProfile", "attach", "measure_shared_link", "plan_pipeline"]
