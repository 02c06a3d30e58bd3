"""Offload under ``torch.distributed.pipelining``: each rank derives its own schedule and follows it.

May import ``measuring``, ``planning`` and what they stand on. Imported by itself, as it needs ``torch.distributed``.
Open ``attach.py`` first.
"""

from offload.pipelining.attach import PipelineOffload, attach
from offload.pipelining.plan import PipelinePlan, StageProfile, plan_pipeline

__all__ = ["PipelineOffload", "PipelinePlan", "StageProfile", "attach", "plan_pipeline"]
