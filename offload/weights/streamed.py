"""Stream the weights of a model that does not fit on the device: the call, its handle and its counters."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.activations.stats import Stats
from offload.base.attributes import with_attribute
from offload.base.checks import check_int, format_bytes, format_s, warn_caller
from offload.base.find_layers import check_layers
from offload.base.layer_events import Attachment, Handle
from offload.base.torch_private import APPLY, ignore_in_ddp
from offload.device.select import get_backend
from offload.host.page_locked import check_room
from offload.optimizer.stream import streams_any_of
from offload.weights.layer import InPlace, WeightLayer, check_parameters, missing_bytes
from offload.weights.parameter import HostParameter
from offload.weights.reduce import check_group
from offload.weights.stream import StreamedLayer, WeightStream, streams

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightStats(Stats):
    """The copies of a :class:`~offload.StreamedWeights` since it was made, and the memory it holds.

    ``after - before`` has the copies between two moments, and the memory that is held ``after``.
    """

    _held = ("weight_bytes", "gradient_host_bytes", "staging_bytes", "slot_bytes")
    loads: int = 0  #: Layers copied from the host to the device.
    loaded_bytes: int = 0  #: Copied from the host to the device.
    late_loads: int = 0
    """Loads that began only when the layer did: one per forward, for its first layer; more are stalls."""
    gradient_bytes: int = 0  #: Gradients copied from the device to the host.
    added_bytes: int = 0
    """Copied gradients that the worker added to ``p.grad``, or converted for it; the others landed in ``p.grad``."""
    staging_waits: int = 0  #: How often backward waited on the host until the worker had freed a staging buffer.
    early_steps: int = 0  #: Optimizer steps of one layer, made in backward by :func:`stream_optimizer`.
    weight_bytes: int = 0  #: Pinned host memory of the parameters.
    gradient_host_bytes: int = 0  #: Pinned host memory of gradients that is kept from step to step.
    staging_bytes: int = 0  #: Pinned host memory where gradients wait to be added.
    slot_bytes: int = 0  #: Device memory of all slots.


class StreamedWeights(Handle):
    """Layers whose weights are streamed from :func:`stream_weights` to :meth:`remove`, or the end of its ``with``."""

    def __init__(self, modules: list[nn.Module], stream: WeightStream) -> None:
        # Weak: the layers hold their listeners, and these the handle.
        self._modules = [weakref.ref(module) for module in modules]
        kinds = " and ".join(sorted({type(module).__name__ for module in modules}))
        self._what = f"{len(modules)} × {kinds}"
        self._stream: WeightStream | None = stream
        self._counters = stream.counters
        listeners = [StreamedLayer(stream, layer) for layer in stream.layers]
        self._attachment = Attachment([modules[layer.number] for layer in stream.layers], listeners, self)
        inner = [each for module in modules for each in module.modules()]
        self._buffers = _move_buffers(
            [(weakref.ref(each), name, stream.device) for each in inner for name, _ in each._buffers.items()]
        )
        for number, module in enumerate(modules):
            # In the dictionary itself: a compiled module hands what is set on to the module that it was made of.
            vars(module)[APPLY] = InPlace(module, f"layer {number} ({type(module).__name__})", stream.device)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block, gradients stay each rank's own; the first backward outside averages their sums.

        As with ``DistributedDataParallel.no_sync()``, which does the same, forward belongs into the block, too.
        """
        reducer = self._in_use.reducer
        return nullcontext() if reducer is None else with_attribute(reducer, "enabled", value=False)

    def prepare_ddp(self, model: nn.Module) -> nn.Module:
        """Let ``DistributedDataParallel``, which is to wrap ``model``, leave the streamed parameters alone.

        Write ``DistributedDataParallel(streamed.prepare_ddp(model))``: the same model is returned. A model whose other
        parameters are all frozen needs no wrapper.

        Raises:
            TypeError: ``model`` is not a module, or it is wrapped already.
            ValueError: ``model`` does not hold the layers.
            RuntimeError: The layers were streamed without ``process_group``, or the handle was removed.
        """
        stream = self._in_use
        if not stream.grouped:
            raise RuntimeError(
                "layers must be streamed with a process_group for prepare_ddp(); pass it to stream_weights."
            )
        if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
            raise TypeError(f"model must be a module that is not wrapped yet, got {type(model).__name__}")
        named = dict(model.named_parameters(remove_duplicate=False))
        if not stream.parameters <= set(named.values()):
            raise ValueError(f"model must hold the streamed layers, got a {type(model).__name__} without some of them")
        names = {name for name, parameter in named.items() if parameter in stream.parameters}
        ignore_in_ddp(model, names)
        return model

    def synchronize(self) -> None:
        """Block until no copy reads the host's weights; the next forward loads them anew.

        Optimizers and ``load_state_dict`` do this by themselves. Call it before you change a parameter in another way
        after a forward whose backward did not run, and after an interrupt in a layer's forward before you use the
        modules' parameters, by ``model.zero_grad()`` for example.
        """
        if self._stream is not None:
            self._stream.settle()

    @property
    def state(self) -> Literal["following", "removed"]:
        """Whether the weights are streamed, or the handle was removed."""
        return "removed" if self._stream is None else "following"

    def stats(self) -> WeightStats:
        """The counters so far, a frozen :class:`~offload.WeightStats`."""
        return WeightStats(**self._counters)

    def remove(self) -> None:
        """Remove the hooks of the layers and free the slots. A second call does nothing.

        Parameters and gradients remain on the host; buffers return to their devices. Existing graphs remain valid.
        """
        if self._stream is None:
            return
        self._stream.close()
        self._attachment.remove()
        for found in self._modules:
            if (module := found()) is not None:
                vars(module).pop(APPLY, None)
        _move_buffers(self._buffers)
        self._stream = None

    def __repr__(self) -> str:
        weights, slots = (format_bytes(self._counters[name]) for name in ("weight_bytes", "slot_bytes"))
        state = f"{slots} on the device" if self._stream else "removed"
        return f"StreamedWeights({self._what}, {weights} on the host, {state})"

    @property
    def _in_use(self) -> WeightStream:
        self.check_in_use()
        return cast("WeightStream", self._stream)


def stream_weights(
    layers: Iterable[nn.Module],
    device: torch.device | str | int | None = None,
    *,
    num_slots: int = 2,
    process_group: ProcessGroup | None = None,
) -> StreamedWeights:
    """Keep the parameters of ``layers`` in pinned host memory, and load each layer's to the device when it computes.

    Model and training loop are as before. Parameters remain the same objects under the same names, on the CPU from now
    on, so optimizers, ``clip_grad_norm_`` and ``state_dict`` work as for a model on the CPU; their gradients are in
    ``p.grad`` when ``backward()`` returns. Modules outside ``layers`` belong on ``device``; ``model.to(device)``, which
    trainers call, moves these alone::

        model.embed.to("cuda"), model.head.to("cuda")
        with stream_weights(model.layers, "cuda") as streamed:
            optimizer = torch.optim.AdamW(model.parameters())
            for batch in batches:
                model(batch.to("cuda")).backward()
                optimizer.step()
                optimizer.zero_grad()

    The optimizer steps on the host. With :func:`stream_optimizer`, called after this, it steps on ``device``, also in
    backward, where gradients never go to the host.

    Args:
        layers: The layers in the order in which forward calls them: an ``nn.ModuleList``, an ``nn.Sequential``, any
            iterable of modules. Their parameters may be on any device, frozen, shared, tied or of different dtypes.
            Their buffers move to the device.
        device: Where the layers compute; ``None`` is the current accelerator, and the CPU where there is none.
        num_slots: Number of layers with weights on the device at once, at least 2. Loads run one layer less ahead;
            and as many layers' gradients may be on their way to the host.
        process_group: Data parallelism: each layer's gradients are averaged over the ranks of this group, on the
            device, during backward. All its ranks must call this, with the same layers, which begin with the weights
            of its first rank; see :meth:`StreamedWeights.prepare_ddp` for parameters outside the layers. ``None``
            leaves gradients to each process.

    Returns:
        A handle with ``stats()`` and ``remove()``, which is also a context manager.

    Raises:
        TypeError: An argument is of another type, or a parameter cannot be streamed.
        ValueError: A layer is listed twice, inside another or streamed already, a parameter cannot be streamed or has
            optimizer state that is streamed, a number is out of its range, or the process group cannot communicate on
            the device or has other layers on another rank. Nothing has been changed then.
        HostMemoryError: The host has too little memory, and nothing has been changed; or it refused to page-lock.
    """
    modules = check_layers(layers, StreamedLayer, "streamed")
    check_parameters(modules)
    check_int("num_slots", num_slots, least=2)
    if streams_any_of({parameter for module in modules for parameter in module.parameters()}):
        raise ValueError(
            "layers must be streamed before the state of their optimizer, but stream_optimizer was called first; "
            "remove() its handle, stream the weights, then stream the optimizer."
        )
    check_room(missing_bytes(modules))
    backend = get_backend(device)
    if process_group is not None:
        check_group(process_group, backend.device, modules)
    known: dict[nn.Parameter, HostParameter] = {}
    begin_s = time.perf_counter()
    found = [WeightLayer(number, module, backend, known) for number, module in enumerate(modules)]
    weight_bytes = sum(len(host.flat) for host in known.values())
    amounts = format_bytes(weight_bytes), len(modules), format_s(time.perf_counter() - begin_s)
    _logger.info("moved %s of weights of %d layers to pinned host memory in %s", *amounts)
    streamed = [layer for layer in found if layer.nbytes]
    stream = WeightStream(backend, streamed, num_slots, process_group)
    handle = StreamedWeights(modules, stream)
    _watch_optimizers(_before_step)
    return handle


_Buffer = tuple[weakref.ref[nn.Module], str, torch.device]


def _move_buffers(targets: list[_Buffer]) -> list[_Buffer]:
    """Move buffers to these devices, a shared one once; returns those that were moved, with the device before."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    origins = []
    for holder, name, device in targets:
        module = holder()
        buffer = None if module is None else module._buffers[name]
        if module is not None and buffer is not None and buffer.device != device:
            if buffer not in moved:
                with torch.inference_mode(False), torch.no_grad():  # the program may continue to train
                    moved[buffer] = buffer.to(device)
            module._buffers[name] = moved[buffer]
            origins.append((holder, name, buffer.device))
    return origins


_watch_optimizers = cache(register_optimizer_step_pre_hook)
"""Has all optimizers run a hook before a step, from the first stream on."""


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    fused_sgd = isinstance(optimizer, torch.optim.SGD) and any(group.get("fused") for group in optimizer.param_groups)
    for stream in list(streams):
        stepped = stream.parameters & {parameter for group in optimizer.param_groups for parameter in group["params"]}
        on_cpu = fused_sgd and not streams_any_of(stepped)
        if on_cpu and torch.__version__ < "2.14" and any(parameter.element_size() == 2 for parameter in stepped):
            warn_of_fused_sgd()
        if stepped:
            stream.settle()


@cache
def warn_of_fused_sgd() -> None:
    """Warn the first time: fused SGD leaves most of a parameter of low precision as it was."""
    warn_caller(
        "SGD with fused=True skips updates of bfloat16 and float16 parameters on the CPU before PyTorch 2.14 "
        "(https://github.com/pytorch/pytorch/pull/192545), and streamed weights are stepped on the CPU; write "
        "fused=False, or update PyTorch."
    )
