"""Gradients averaged over the ranks of a process group, on a stream beside compute, before they go to the host.

What is averaged is what ``DistributedDataParallel`` would average: the gradient of this backward, added to what earlier
microbatches have left in ``p.grad``, which comes up from the host for it. The average replaces ``p.grad`` on all ranks.

All ranks must start the same collectives in the same order. So every backward averages every layer, the last one first,
and all of a layer's trained parameters at once, with zeros for those that have no gradient on this rank. At the end the
ranks tell each other which parameters have one at all.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from offload.base import trace
from offload.base.torch_private import running_ddp
from offload.device.backend import Backend
from offload.weights.layer import WeightLayer
from offload.weights.parameter import Gradients, HostParameter, aligned
from offload.weights.slots import WeightWait
from offload.weights.stats import WeightCounters

_Sum = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A gradient, what is on the host to be added to it, and where that lands on the device."""


class GradientReducer:
    """Averages the gradients of one layer after the other, while compute goes on.

    To make one is a collective, too: all ranks get the weights that the group's first rank has.
    """

    def __init__(
        self, backend: Backend, layers: list[WeightLayer], group: dist.ProcessGroup, counters: WeightCounters
    ) -> None:
        self.enabled = True  # not while gradients are still to be added to
        self.averages = False  # whether backward does; its forward decides
        self._backend = backend
        self._layers = layers
        self._group = group
        self._counters = counters
        self._d2h_stream, self._h2d_stream = backend.copy_streams
        self._stream = backend.new_stream("reduce")
        self._left = len(layers)  # of this backward: the first so many layers have not been averaged
        for target, source in [pair for layer in layers for pair in layer.copies]:
            target.copy_(source)  # by way of the slots, which are empty
            dist.broadcast(target, group=group, group_src=0)
            source.copy_(target)
        self._hosts = dict.fromkeys(host for layer in layers for host in layer.parameters)  # each once, in order

    def see_forward(self) -> None:
        """A forward runs: whether its backward averages is decided now, as ``DistributedDataParallel`` does."""
        wrapper = running_ddp()
        self.averages = self.enabled and (wrapper is None or wrapper.require_backward_grad_sync)

    def due(self, layer: WeightLayer | None) -> list[WeightLayer]:
        """The layers to average when backward leaves ``layer``, or ends (``None``): also layers that it has skipped."""
        first = 0 if layer is None else layer.rank
        layers = self._layers[first : self._left][::-1]
        self._left = min(self._left, first)
        return layers if layer is None or layers else [layer]

    def average(self, layer: WeightLayer) -> list[torch.Tensor]:
        """Let ``layer.gradients`` be the averages over all ranks, of all the layer's trained parameters.

        The d2h stream waits for them. Returns what else must be held until they have left the device.
        """
        trained = [host for host in layer.parameters if host.parameter.requires_grad]
        averages: Gradients = {}
        held = []
        for dtype in dict.fromkeys(host.gradient_dtype for host in trained):
            held += self._average(layer, [host for host in trained if host.gradient_dtype is dtype], dtype, averages)
        layer.gradients[:] = [averages]
        return held

    def finish(self) -> None:
        """All layers have been averaged: drop the averages of parameters that no rank has a gradient of."""
        hosts = [host for host in self._hosts if host.averaged]
        used = torch.tensor([host.used for host in hosts], dtype=torch.int32, device=self._backend.device)
        # Compute has made the tensor.
        self._backend.wait(self._stream, self._backend.compute_stream().record_event(), WeightWait.GRADIENT)
        reduce = partial(dist.all_reduce, used, dist.ReduceOp.MAX, self._group, async_op=True)
        self._backend.collective(self._stream, reduce)
        # The host reads it next: which gradients become None is decided there.
        self._backend.wait_on_host(self._stream.record_event(), WeightWait.WRITTEN)
        for host, anywhere in zip(hosts, used.tolist(), strict=True):
            if not anywhere:
                host.total = None
        self.reset()

    def reset(self) -> None:
        """The next backward begins anew."""
        self._left = len(self._layers)

    def _average(
        self, layer: WeightLayer, hosts: list[HostParameter], dtype: torch.dtype, averages: Gradients
    ) -> list[torch.Tensor]:
        """Average gradients of one dtype; returns the sums that are added to them."""
        backend = self._backend
        flat, sums = self._gather(layer, hosts, dtype, averages)
        gathered = backend.compute_stream().record_event()
        if sums:
            # The sums land in memory that compute has just allocated, and may have used for something else before.
            backend.wait(self._h2d_stream, gathered, WeightWait.SUM_LANDING)
            with trace.mark("h2d", layer.number):
                for _, before, landed in sums:
                    backend.copy(self._h2d_stream, landed, before)
                    self._counters["loaded_bytes"] += landed.nbytes
            backend.wait(self._stream, self._h2d_stream.record_event(), WeightWait.SUM)  # they are added there
        backend.wait(self._stream, gathered, WeightWait.GRADIENT)  # compute has gathered what is averaged

        def start() -> dist.Work | None:
            for average, _, landed in sums:
                average.add_(landed)
            numbers = flat.view(dtype)
            numbers.mul_(1 / self._group.size())  # before the sum, where low precision could overflow
            work: dist.Work | None = dist.all_reduce(numbers, group=self._group, async_op=True)
            return work

        backend.collective(self._stream, start)
        # The copies to the host are queued next.
        backend.wait(self._d2h_stream, self._stream.record_event(), WeightWait.AVERAGED)
        return [landed for *_, landed in sums]

    def _gather(
        self, layer: WeightLayer, hosts: list[HostParameter], dtype: torch.dtype, averages: Gradients
    ) -> tuple[torch.Tensor, list[_Sum]]:
        """Copy gradients into flat memory, on compute: they go at once."""
        sizes = [aligned(host.parameter.numel() * dtype.itemsize) for host in hosts]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._backend.device)
        sums: list[_Sum] = []
        for host, memory in zip(hosts, flat.split(sizes), strict=True):
            average = averages[host] = host.over(memory, dtype)
            found = [gradients[host] for gradients in layer.gradients if host in gradients]
            average.copy_(found[0]) if found else average.zero_()
            for gradient in found[1:]:
                average.add_(gradient)
            before = host.begin_average(used=bool(found))
            if before is not None:
                sums.append((average, before, host.over(self._backend.empty(len(memory)), dtype)))
        return flat, sums


def check_group(group: object, device: torch.device, modules: list[nn.Module]) -> None:
    """Raise if this is no process group that reduces on ``device``, or its ranks stream other layers than this one."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup that this rank is in, got {type(group).__name__}; "
            "pass torch.distributed.group.WORLD after init_process_group, or what get_group() of a mesh returns."
        )
    kinds = dist.get_backend_config(group)
    if f"{device.type}:" not in kinds:
        raise ValueError(
            f"process_group must have a backend for {device.type}, where the layers compute, got {kinds!r}; make it "
            f"with {'gloo' if device.type == 'cpu' else 'nccl'}."
        )
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    mine = [len(modules), sum(parameter.nbytes for parameter in parameters), trained]
    largest = torch.tensor([*mine, *(-number for number in mine)], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    most, least = largest[:3].tolist(), (-largest[3:]).tolist()
    if most != least:
        raise ValueError(
            "layers must be the same on all ranks of process_group, got {} to {} layers of {} to {} bytes, of which {} "
            "to {} are trained.".format(*(number for pair in zip(least, most, strict=True) for number in pair))
        )
