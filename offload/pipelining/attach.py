"""Offload the activations of a rank's stages under ``torch.distributed.pipelining``, by a derived schedule.

Every schedule of PyTorch runs a chunk, one microbatch on one stage, by calling three methods of the stage;
:func:`attach` puts wrappers on the stage's instance that turn these calls into points of a plan. (The extra forward
that infers shapes calls the stage's module directly.) The first step is measured, without offloading: its order, the
seconds of each stage and the bytes that it saves. With a ``profile``, offloading starts then.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.activations.copies import Transfers
from offload.activations.round import Round
from offload.activations.stats import OffloadStats
from offload.activations.what_moves import exclude, exclude_parameters
from offload.base.attributes import replace_attribute
from offload.base.checks import parse_bytes
from offload.base.layer_events import Handle
from offload.base.tensors import tensors_in
from offload.base.torch_private import pipeline_stages
from offload.device.backend import Backend, Event
from offload.device.select import get_backend
from offload.host.pool import get_host_pool
from offload.measuring.measure_link import measure_link
from offload.measuring.memory_left import allocated_bytes
from offload.pipelining.chunk import ChunkParts, LayeredChunk, StageLayers
from offload.pipelining.order import Action, Chunk, read_actions, without_idle_inputs
from offload.pipelining.plan import PipelinePlan, StageProfile, check_options, plan_pipeline
from offload.planning.profile import Link
from offload.recompute.policies import Policy, parse_policies
from offload.schedule.schedule import Schedule

_logger = logging.getLogger(__name__)

PARTS = 16  # into how many parts each chunk's activation set is cut: memory changes in steps of a sixteenth
ALL_PARTS = 512  # the most parts of all chunks: with many chunks, larger parts are a small fraction, too


def attach(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti,
    *,
    memory_budget: int | str | None = None,
    parts: int | None = None,
    profile: Mapping[int, StageProfile] | None = None,
    link: Link | None = None,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    device: torch.device | str | int | None = None,
    policies: Mapping[str, Policy | str] | None = None,
) -> PipelineOffload:
    """Offload the activations of this rank's stages, by a schedule derived from the rank's own order.

    Call it on each rank that should offload, before the first step::

        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        with offload.pipelining.attach(schedule) as handle:
            for batch in batches:
                schedule.step(batch)
        print(handle.plan)

    Without a budget, everything is offloaded that the link can copy while compute goes on.

    Args:
        schedule: A schedule of ``torch.distributed.pipelining``.
        memory_budget: Bytes of activation sets on this rank's device at once, or a text such as ``"20GiB"``.
        parts: Into how many parts each chunk's activation set is cut; 16, or fewer where there are many chunks.
        profile: Stage → what a chunk of it costs, such as an earlier handle's ``profile``, to offload from the first
            step on; measured in the first step if left out. With ``policies``, of a handle with these policies.
        link: The bandwidth of the link between this rank's device and its host; measured if left out.
        min_bytes: Storages smaller than this are kept on the device; bytes, or a text such as ``"1MiB"``.
        device: The device whose activations are offloaded; that of the stages by default.
        policies: What happens to the regions of each layer of the stages, as :func:`offload.offload_layers` takes them.
            A region with ``"offload"`` is offloaded where the plan says so, and else kept. Each layer is a part of its
            chunks then. The layers are the list of modules with the most parameters in a stage; tensors that the stage
            saves outside of its layers are kept.

    Returns:
        A handle with ``plan``, ``state``, ``stats()`` and ``remove()``, which is also a context manager.
    """
    if not isinstance(schedule, PipelineScheduleSingle | PipelineScheduleMulti):
        raise TypeError(f"schedule must be one of torch.distributed.pipelining, got {type(schedule).__name__}")
    stages = pipeline_stages(schedule)
    for stage in stages:
        if isinstance(vars(stage).get("forward_one_chunk"), _Wrapper):
            raise ValueError(f"stage {stage.stage_index} is attached already; call remove() on the first handle")
    check_options(memory_budget, parts, profile, link)
    if policies is not None and parts is not None:
        raise ValueError(f"parts must be left out with policies, as each layer is a part then, got {parts}")
    if policies is not None and any(costs.saved_bytes and not costs.layers for costs in (profile or {}).values()):
        raise ValueError("profile must say what each layer saves with policies, as that of a handle with policies does")
    if policies is None and profile is not None:
        profile = {stage: replace(costs, layers=()) for stage, costs in profile.items()}
    patterns = None if policies is None else parse_policies(policies)
    min_bytes = parse_bytes(min_bytes, "min_bytes")
    backend = get_backend(stages[0].device if device is None else device)
    link = link or measure_link(backend.device)
    options: dict[str, Any] = {"memory_budget": memory_budget, "link": link, "parts": parts}
    handle = PipelineOffload(stages, backend, patterns, profile, min_bytes, options)
    try:
        order = known_order(schedule, stages)
        if order is not None and profile is not None:
            handle.make_plan(order)
    except BaseException:
        handle.remove()
        raise
    return handle


class _Wrapper(partial[Any]):
    """A method of a stage, replaced on the instance."""


class PipelineOffload(Handle):
    """A rank's stages whose activations are offloaded; made by :func:`attach`, undone by :meth:`remove`."""

    def __init__(
        self,
        stages: list[Any],
        backend: Backend,
        patterns: Mapping[str, Policy] | None,
        profile: Mapping[int, StageProfile] | None,
        min_bytes: int,
        options: Mapping[str, Any],
    ) -> None:
        exclude_parameters(stage.submod for stage in stages)
        self.plan: PipelinePlan | None = None
        """What is offloaded when; ``None`` until the second step, if no profile was given."""
        self.profile = profile
        """Stage → what a chunk of it costs; ``None`` until the second step, if it was not given."""
        self._backend = backend
        self._transfers = Transfers(backend, get_host_pool(backend))
        self._layers = None if patterns is None else StageLayers(stages, patterns, self)
        self._min_bytes = min_bytes
        self._options = options if self._layers is None else {**options, "parts": self._layers.parts}
        self._probe = Probe(backend) if profile is None else None
        self._round: Round  # of the step that runs
        self._chunks: dict[Chunk, ChunkParts] = {}
        """Chunks whose backward is not over."""
        self._ran: list[Action] = []
        self._wrappers: list[tuple[Any, str, _Wrapper, Callable[[], None]]] = []
        methods = {
            "forward_one_chunk": self._forward,
            "backward_one_chunk": partial(self._backward, "B"),
            "backward_weight_one_chunk": partial(self._backward, "W"),
        }
        for stage in stages:
            for name, run in methods.items():
                wrapper = _Wrapper(self._call, run, stage, getattr(stage, name))
                self._wrappers.append((stage, name, wrapper, replace_attribute(stage, name, wrapper)))

    @property
    def state(self) -> Literal["measuring", "following", "removed"]:
        """Whether there is no plan yet, the plan is followed, or the stages were given back."""
        return "removed" if not self._wrappers else "measuring" if self.plan is None else "following"

    def make_plan(self, order: tuple[Action, ...]) -> PipelinePlan:
        """Plan for this order of actions, and follow the plan. The profile must be known."""
        chunks = sum(action.kind == "F" for action in order)
        parts = self._options["parts"] or max(1, min(PARTS, ALL_PARTS // chunks))
        options: Any = {**self._options, "profile": self.profile, "parts": parts}
        self.plan = plan_pipeline(order, **options)
        return self.plan

    def remove(self) -> None:
        """Take the wrappers off the stages. Existing graphs remain valid. A second call does nothing."""
        for stage, name, wrapper, put_back in self._wrappers:
            if vars(stage).get(name) is wrapper:  # if it was replaced again since, it only passes calls on
                put_back()
        self._wrappers.clear()
        if self._layers is not None:
            self._layers.remove()

    def regions(self, stage: int, layer: int = 0) -> dict[str, str]:
        """The policy of each region of a stage's layer, by the region's name, once the layer has run forward."""
        policies = None if self._layers is None else self._layers.policies.get(stage)
        return {} if policies is None else policies[layer].by_name()

    def stats(self) -> OffloadStats:
        """The counters so far, a frozen :class:`~offload.OffloadStats`."""
        return self._transfers.stats()

    def __repr__(self) -> str:
        plan = "no plan yet" if self.plan is None else repr(self.plan)
        return f"PipelineOffload({plan}, device={str(self._backend.device)!r}, {self.state})"

    def _call(self, run: Callable[..., Any], stage: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(stage, method, *args, **kwargs) if self._wrappers else method(*args, **kwargs)

    def _forward(self, stage: Any, method: Callable[..., Any], fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not (stage.has_backward and torch.is_grad_enabled()):
            return method(fwd_chunk_id, *args, **kwargs)
        number, action = stage.stage_index, Action(stage.stage_index, "F", fwd_chunk_id)
        if not self._ran or action in self._ran:  # also after a step that was cut off
            self._round = self._begin_step()
        # The stage keeps the inputs of a chunk on the device until the chunk's backward.
        buffers = [getattr(info, "buffer", None) for info in stage.args_recv_info.get(fwd_chunk_id, ())]
        for tensor in tensors_in((args, kwargs, buffers)):
            exclude(tensor, "pipeline")
        place = sum(ran.kind == "F" for ran in self._ran)
        if self._layers is not None:
            chunk: ChunkParts = LayeredChunk(self._round, place, self._layers, number)
        elif self.plan is None:
            chunk = ChunkParts(self._round, place, 1)
        else:
            parts = self.plan.parts
            chunk = ChunkParts(self._round, place, parts, self.plan.profile[number].saved_bytes / parts)
        with chunk:
            result = self._watched(action, lambda: method(fwd_chunk_id, *args, **kwargs))
        self._chunks[action.chunk] = chunk
        if self._probe is not None:
            self._probe.count(number, chunk.saved())
        return result

    def _backward(
        self, kind: str, stage: Any, method: Callable[..., Any], bwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        if kind == "B" and not kwargs.get("full_backward", args[1] if len(args) > 1 else True):
            kind = "I"
        call = partial(method, bwd_chunk_id, *args, **kwargs)
        place = Chunk(stage.stage_index, bwd_chunk_id)
        chunk = self._chunks.get(place)
        if chunk is None or (kind == "I" and skips_inputs(stage)):
            return call()
        if kind == "W" and skips_inputs(stage):
            kind = "B"
        chunk.reach(chunk.parts - 1)
        result = self._watched(Action(place.stage, kind, place.microbatch), call)
        chunk.reach(0)  # also where backward asked for nothing of some parts
        if kind != "I":
            del self._chunks[place]
        return result

    def _watched(self, action: Action, call: Callable[[], Any]) -> Any:
        with nullcontext() if self._probe is None else self._probe.watch(action):
            result = call()
        self._ran.append(action)
        return result

    def _begin_step(self) -> Round:
        """The first forward of a step: plan by what the last step showed, if it was a whole one."""
        ran: tuple[Action, ...] = ()
        with suppress(ValueError):  # it was cut off
            ran = read_actions(self._ran)
        if ran and self._probe is not None:
            self.profile, self._probe = self._probe.profile(), None
        if ran and self.profile is not None and (self.plan is None or ran != self.plan.actions):
            plan = self.make_plan(ran)
            _logger.info("for the order %s:\n%s", ran, plan)
            self._transfers.pool.reserve(plan.host_bytes)
        self._chunks.clear()
        self._ran.clear()
        schedule = Schedule(1) if self.plan is None else self.plan.schedule
        policies_of = None if self._layers is None else self._layers.policies_of
        return Round(schedule, self._transfers, self._min_bytes, policies_of=policies_of)


def known_order(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti, stages: list[Any]
) -> tuple[Action, ...] | None:
    """The order that the schedule lists for this rank; ``None`` if it lists none, or no whole step.

    PyTorch 2.13 lists no whole step for the last rank of 1F1B, and where there are fewer microbatches than stages.
    """
    rank = stages[0].stage_index if isinstance(schedule, PipelineScheduleSingle) else schedule.rank
    try:
        order = read_actions((schedule.pipeline_order or {}).get(rank, ()))
    except ValueError:
        return None
    for stage in filter(skips_inputs, stages):
        order = without_idle_inputs(order, stage.stage_index)
    return order or None


def skips_inputs(stage: Any) -> bool:
    """Whether the stage does nothing in its backward for the inputs, and everything in that for the weights."""
    return bool(stage.is_first) and stage.dw_builder is None


class Probe:
    """Measures one step of a rank: the seconds of its actions and the bytes that its chunks save."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._saved: dict[int, tuple[tuple[int, ...], int, tuple[int, ...]]] = {}
        self._weight_bytes: defaultdict[int, int] = defaultdict(int)
        self._marks: defaultdict[tuple[int, str], list[tuple[Event, Event]]] = defaultdict(list)

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        before_bytes = allocated_bytes(self._backend.device)
        start = self._backend.mark()
        yield
        self._marks[action.stage, action.kind].append((start, self._backend.mark()))
        if action.kind == "I":
            more_bytes = allocated_bytes(self._backend.device) - before_bytes
            self._weight_bytes[action.stage] = max(more_bytes, self._weight_bytes[action.stage])

    def count(self, stage: int, saved: tuple[tuple[int, ...], int, tuple[int, ...]]) -> None:
        """Note what one of the stage's chunks has saved; the largest counts."""
        if stage not in self._saved or sum(saved[0]) >= sum(self._saved[stage][0]):
            self._saved[stage] = saved

    def profile(self) -> dict[int, StageProfile]:
        """The profile of each stage. Of several chunks the fastest counts, as the first ones also load kernels."""
        found = {}
        for stage, (tensors, kept_bytes, layers) in self._saved.items():
            marks = (self._marks[stage, kind] for kind in "FBIW")
            forward_s, whole_s, inputs_s, weight_s = (min(self._backend.seconds(one), default=0.0) for one in marks)
            beside = self._weight_bytes[stage], kept_bytes, layers
            found[stage] = StageProfile(forward_s, whole_s or inputs_s, weight_s, sum(tensors), tensors, *beside)
        return found
