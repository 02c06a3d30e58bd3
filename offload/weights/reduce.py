"""Gradients averaged over the ranks of a process group, on a stream beside compute, before their copy to the host.

The average is what ``DistributedDataParallel`` computes: of this backward's gradient plus what earlier microbatches
have left in ``p.grad``, which is copied to the device for it. The average replaces ``p.grad`` on all ranks.

All ranks must start the same collectives in the same order. So every backward averages every layer, the last one first,
and all trained parameters of a layer at once, with zeros where this rank has no gradient. At the end the ranks exchange
which parameters have a gradient on any rank.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from offload.base import trace
from offload.base.tensors import aligned
from offload.base.torch_private import running_ddp
from offload.device.backend import Backend
from offload.weights.gradients import GradientWriter
from offload.weights.layer import WeightLayer, WeightWait
from offload.weights.parameter import Gradients, HostParameter


class GradientReducer:
    """Averages gradients and has them written back. To make one is a collective: all ranks get the first's weights."""

    def __init__(
        self, backend: Backend, layers: list[WeightLayer], group: dist.ProcessGroup, writer: GradientWriter
    ) -> None:
        self.enabled = True  # False inside no_sync()
        self.averages = False  # whether backward averages; decided in its forward
        self._backend = backend
        self._layers = layers
        self._group = group
        self._writer = writer
        self._d2h_stream, self._h2d_stream = backend.copy_streams
        self._stream = backend.new_stream("reduce")
        for target, source in [pair for layer in layers for pair in layer.copies]:
            target.copy_(source)  # by way of the slots, which are empty
            dist.broadcast(target, group=group, group_src=0)
            source.copy_(target)
        self.reset()

    def reset(self) -> None:
        """The next backward begins anew."""
        self._left = len(self._layers)  # the first so many layers have not been averaged
        self._used: dict[HostParameter, bool] = {}  # what has been averaged, and whether this rank has a gradient of it

    def see_forward(self) -> None:
        """Decide at a forward whether its backward averages, as ``DistributedDataParallel`` does."""
        wrapper = running_ddp()
        self.averages = self.enabled and (wrapper is None or wrapper.require_backward_grad_sync)

    def write_back(self, layer: WeightLayer) -> None:
        """Average and write back a layer that backward has left, after the layers behind it that backward skipped."""
        if layer.gradients:
            self._average_down_to(layer.rank)
            if layer.gradients:  # it was averaged in this backward before
                self._writer.write_back(layer, self._average(layer))

    def finish(self) -> None:
        """Average what is left, and drop the averages of parameters that have a gradient on no rank."""
        self._average_down_to(0)
        # Made on the host, which has copied it to the device when it goes on.
        used = torch.tensor(list(self._used.values()), dtype=torch.int32, device=self._backend.device)
        reduce = partial(dist.all_reduce, used, dist.ReduceOp.MAX, self._group, async_op=True)
        self._backend.collective(self._stream, reduce)
        # The host reads it next: which gradients become None is decided there.
        self._backend.wait_on_host(self._stream.record_event(), WeightWait.WRITTEN)
        for host, anywhere in zip(self._used, used.tolist(), strict=True):
            if not anywhere:
                host.total = None

    def _average_down_to(self, rank: int) -> None:
        while self._left > rank:
            self._left -= 1
            layer = self._layers[self._left]
            self._writer.write_back(layer, self._average(layer))

    def _average(self, layer: WeightLayer) -> list[torch.Tensor]:
        """Replace ``layer.gradients`` by averages, for which the d2h stream waits; returns other memory to hold."""
        trained = [host for host in layer.parameters if host.parameter.requires_grad]
        averages: Gradients = {}
        held = []
        for dtype in dict.fromkeys(host.gradient_dtype for host in trained):
            hosts = [host for host in trained if host.gradient_dtype is dtype]
            # Compute copies the gradients into flat memory, so that the gradients themselves are freed.
            sizes = [aligned(host.parameter.numel() * dtype.itemsize) for host in hosts]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._backend.device)
            sums = []  # of each: the average, what is added to it, and the device memory for that
            for host, memory in zip(hosts, flat.split(sizes), strict=True):
                average = averages[host] = host.over(memory, dtype)
                found = layer.gradients.get(host)
                average.zero_() if found is None else average.copy_(found)
                host.hold_gradient()
                first = host not in self._used  # later averages of one backward are added on the host
                if first and host.before is not None:
                    host.total, host.before = host.before, None
                host.replaces = first and host.total is not None
                self._used[host] = found is not None or host.replaces or self._used.get(host, False)
                if host.replaces and host.total is not None:
                    sums.append((average, host.total, host.over(self._backend.empty(len(memory)), dtype)))
            self._start(layer, flat.view(dtype), sums)
            held += [landed for *_, landed in sums]
        layer.gradients.clear()
        layer.gradients.update(averages)
        return held

    def _start(
        self, layer: WeightLayer, numbers: torch.Tensor, sums: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> None:
        """Queue the average of ``numbers``, and of what is added to them."""
        backend = self._backend
        gathered = backend.compute_stream().record_event()
        if sums:
            # The sums land in memory that compute has just allocated, and may have used for something else before.
            backend.wait(self._h2d_stream, gathered, WeightWait.SUM_LANDING)
            with trace.mark("h2d", layer.number):
                for _, before, landed in sums:
                    backend.copy(self._h2d_stream, landed, before)
                    self._writer.counters["loaded_bytes"] += landed.nbytes
            backend.wait(self._stream, self._h2d_stream.record_event(), WeightWait.SUM)  # they are added there
        backend.wait(self._stream, gathered, WeightWait.GRADIENT)  # compute has gathered what is averaged

        def start() -> dist.Work | None:
            for average, _, landed in sums:
                average.add_(landed)
            numbers.mul_(1 / self._group.size())  # before the sum, where low precision could overflow
            work: dist.Work | None = dist.all_reduce(numbers, group=self._group, async_op=True)
            return work

        backend.collective(self._stream, start)
        # The copies to the host are queued next.
        backend.wait(self._d2h_stream, self._stream.record_event(), WeightWait.AVERAGED)


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
