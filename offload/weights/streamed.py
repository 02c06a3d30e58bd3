"""Stream the weights of a model that does not fit on the device, by module hooks: what the user calls and holds."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.base.checks import format_bytes, format_s, is_int, warn_caller
from offload.base.layer_events import Attachment, Handle, check_layers
from offload.base.progress import progress_bar
from offload.base.torch_private import ignore_in_ddp
from offload.device.select import get_backend
from offload.host.page_locked import check_room
from offload.weights.layer import WeightLayer, check_parameters, keep_in_place, let_move, missing_bytes
from offload.weights.parameter import HostParameter
from offload.weights.reduce import GradientReducer, check_group
from offload.weights.stats import WeightStats
from offload.weights.step import LayerSteps, MakeOptimizer, check_make_optimizer
from offload.weights.stream import StreamedLayer, WeightStream

_logger = logging.getLogger(__name__)

_streams: weakref.WeakSet[WeightStream] = weakref.WeakSet()
"""What an optimizer's step may be about to change. Weak: a stream lives as long as its layers' hooks and graphs."""


class StreamedWeights(Handle):
    """Layers whose weights are streamed; made by :func:`stream_weights`, undone by :meth:`remove`.

    As a context manager it is undone at the end of the block.
    """

    def __init__(self, modules: list[nn.Module], stream: WeightStream) -> None:
        # Weakly, as the layers hold this: what undoes it.
        self._modules = [weakref.ref(module) for module in modules]
        kinds = " and ".join(sorted({type(module).__name__ for module in modules}))
        self._what = f"{len(modules)} × {kinds}"
        self._stream: WeightStream | None = stream
        self._counters = stream.counters
        self._attachment = Attachment(
            [modules[layer.number] for layer in stream.layers],
            [StreamedLayer(stream, layer) for layer in stream.layers],
            self,
        )
        inner = [each for module in modules for each in module.modules()]
        moved = _move_buffers([(each, name, stream.device) for each in inner for name in each._buffers])
        self._buffers = [(weakref.ref(each), name, device) for each, name, device in moved]
        keep_in_place(modules, stream.device)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step in backward, in the order of the layers; empty without ``step_in_backward``.

        Give each a scheduler, save and load the ``state_dict`` of each, and change hyperparameters between backwards.
        """
        return self._alive().steps.optimizers

    def no_step(self) -> AbstractContextManager[None]:
        """Inside the block, backward adds to ``p.grad`` and steps nothing, for all microbatches but the last."""
        return _off(self._alive().steps)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block, gradients stay each rank's own; the first backward outside averages their sums.

        As with ``DistributedDataParallel.no_sync()``, which does the same, forward belongs into the block, too.
        """
        reducer = self._alive().reducer
        return nullcontext() if reducer is None else _off(reducer)

    def prepare_ddp(self, model: nn.Module) -> nn.Module:
        """Let ``DistributedDataParallel``, which is to wrap ``model``, leave the streamed parameters alone.

        Write ``DistributedDataParallel(streamed.prepare_ddp(model))``. A model that has no other parameters that are
        trained needs no wrapper: the layers' gradients are averaged without it.

        Args:
            model: The model that the streamed layers are a part of, not wrapped yet.

        Returns:
            The same model.

        Raises:
            TypeError: ``model`` is not a module, or it is wrapped already.
            ValueError: It does not hold the layers.
            RuntimeError: The layers were streamed without ``process_group``, or the handle was removed.
        """
        stream = self._alive()
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

        Optimizers of ``torch.optim`` and ``load_state_dict`` do this by themselves. Call it before you change a
        parameter in another way after a forward whose backward did not run, and after an interrupt in a layer's
        forward before you use the modules' parameters, by ``model.zero_grad()`` for example.
        """
        if self._stream is not None:
            self._stream.settle()

    def stats(self) -> WeightStats:
        """A frozen snapshot of what has moved so far."""
        return WeightStats(**self._counters)

    def remove(self) -> None:
        """Take the hooks off the layers and their slots off the device. A second call does nothing.

        Parameters and their gradients stay on the host, where they are; buffers return to where they were. Graphs
        that exist stay valid.
        """
        if self._stream is None:
            return
        self._stream.close()
        self._attachment.remove()
        let_move(_alive(self._modules))
        _move_buffers([(each, name, device) for found, name, device in self._buffers for each in _alive([found])])
        self._stream = None

    def __enter__(self) -> Self:
        self._alive()
        return self

    def __repr__(self) -> str:
        weights, slots = (format_bytes(self._counters[name]) for name in ("weight_bytes", "slot_bytes"))
        state = f"{slots} on the device" if self._stream else "removed"
        return f"StreamedWeights({self._what}, {weights} on the host, {state})"

    def _alive(self) -> WeightStream:
        if self._stream is None:
            raise RuntimeError("the handle must be in use, but it was removed; stream the layers again.")
        return self._stream


def stream_weights(
    layers: Iterable[nn.Module],
    device: torch.device | str | int | None = None,
    *,
    num_slots: int = 2,
    grad_dtype: torch.dtype | None = None,
    num_staging: int = 3,
    process_group: ProcessGroup | None = None,
    step_in_backward: MakeOptimizer | None = None,
) -> StreamedWeights:
    """Keep the parameters of ``layers`` in pinned host memory, and load each layer's to the device when it computes.

    Nothing changes in the model or in the training loop. Parameters stay the same objects under the same names,
    on the CPU from now on, so optimizers, ``clip_grad_norm_`` and ``state_dict`` work as they do for a
    model on the CPU; their gradients are in ``p.grad`` when ``backward()`` returns. What is outside ``layers``
    stays where it is, and belongs on ``device``; ``model.to(device)``, which trainers call, moves that alone::

        model.embed.to("cuda"), model.head.to("cuda")
        with stream_weights(model.layers, "cuda") as streamed:
            optimizer = torch.optim.AdamW(model.parameters())
            for batch in batches:
                model(batch.to("cuda")).backward()
                optimizer.step()
                optimizer.zero_grad()

    Args:
        layers: The layers in the order in which forward calls them: an ``nn.ModuleList``, an ``nn.Sequential``, any
            iterable of modules. Their parameters may be anywhere, may be frozen, shared, tied or of different dtypes.
            Buffers move to the device and stay there.
        device: Where the layers compute; ``None`` is the current accelerator, and the CPU where there is none.
        num_slots: Of how many layers the weights are on the device at once, at least 2. The loads run that many
            layers ahead, less one; and as many layers' gradients may be copied back.
        grad_dtype: ``torch.float32`` to add the gradients of microbatches up in float32, and find them so in
            ``p.grad``; ``None`` for each parameter's own dtype. PyTorch's Adam optimizers demand the parameter's dtype.
        num_staging: How many layers' gradients may wait on the host to be added, from the second
            microbatch on; a buffer each. When all are taken, backward waits for the host.
        process_group: Data parallelism: each layer's gradients are averaged over the ranks of this group, on the
            device, beside backward. All its ranks must call this, with the same layers, which begin with the weights
            of its first rank; see :meth:`StreamedWeights.prepare_ddp` for what is outside the layers. ``None`` leaves
            gradients to each process.
        step_in_backward: A function that makes the optimizer of one layer from a list of the layer's parameters, such
            as ``lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True)``. Each layer is stepped as soon
            as its gradients are on the host, beside the rest of backward, and its gradients are ``None`` when
            ``backward()`` returns. Gradients cannot be clipped by a norm over all layers, nor unscaled by a
            ``GradScaler``: do not use these. Run all microbatches of a step but the last in
            :meth:`StreamedWeights.no_step`. An optimizer of the program's takes the parameters outside the layers.

    Returns:
        A handle with ``stats()`` and ``remove()``, which is also a context manager.

    Raises:
        TypeError: ``layers`` does not hold modules, a parameter is of a kind that cannot be streamed,
            ``process_group`` is no process group that this rank is in, or ``step_in_backward`` makes no optimizers.
        ValueError: There are no layers or parameters, a layer is listed twice, inside another or streamed already, a
            parameter cannot be streamed, a number is out of its range, or the process group cannot communicate on the
            device or has other layers on another rank. Nothing has been changed then. Or ``step_in_backward`` made an
            optimizer of other parameters than the layer's, which are on the host by then.
        HostMemoryError: The system has not that much host memory left, and nothing has been changed; or it refused to
            page-lock it.
    """
    modules = check_layers(layers, StreamedLayer, "streamed", "is still listed once")
    check_parameters(modules)
    for name, value, least in (("num_slots", num_slots, 2), ("num_staging", num_staging, 1)):
        if not is_int(value, least):
            why = "one slot cannot be loaded while it is used" if least == 2 else "gradients need a place to wait"
            raise ValueError(f"{name} must be at least {least}, got {value!r}; {why}")
    if grad_dtype not in (None, torch.float32):
        raise ValueError(f"grad_dtype must be torch.float32 or None, got {grad_dtype!r}")
    if step_in_backward is not None:
        check_make_optimizer(step_in_backward)
    check_room(missing_bytes(modules))
    backend = get_backend(device)
    if process_group is not None:
        check_group(process_group, backend.device, modules)
    known: dict[nn.Parameter, HostParameter] = {}
    found = []
    begin_s = time.perf_counter()
    with progress_bar("moving weights to pinned host memory", len(modules), " layers") as advance:
        for number, module in enumerate(modules):
            found.append(WeightLayer(number, module, backend, known, grad_dtype))
            advance(1)
    weight_bytes = sum(len(host.flat) for host in known.values())
    amounts = format_bytes(weight_bytes), len(modules), format_s(time.perf_counter() - begin_s)
    _logger.info("moved %s of weights of %d layers to pinned host memory in %s", *amounts)
    streamed = [layer for layer in found if layer.nbytes]
    stream = WeightStream(backend, streamed, num_slots, num_staging, process_group, step_in_backward)
    handle = StreamedWeights(modules, stream)
    _watch_optimizers()
    _streams.add(stream)
    return handle


@contextmanager
def _off(part: LayerSteps | GradientReducer) -> Iterator[None]:
    """Let backward go without a part of its work inside the block."""
    before, part.enabled = part.enabled, False
    try:
        yield
    finally:
        part.enabled = before


def _alive(modules: Iterable[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for found in modules if (module := found()) is not None]


def _move_buffers(targets: list[tuple[nn.Module, str, torch.device]]) -> list[tuple[nn.Module, str, torch.device]]:
    """Move buffers, each where it is told to; returns those that were moved, and where they came from."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    origins = []
    for module, name, device in targets:
        buffer = module._buffers[name]
        if buffer is not None and buffer.device != device:
            if buffer not in moved:
                moved[buffer] = buffer.to(device)
            module._buffers[name] = moved[buffer]
            origins.append((module, name, buffer.device))
    return origins


@cache
def _watch_optimizers() -> None:
    """Have all optimizers run a hook before a step, from the first stream on."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for stream in list(_streams):
        _warn_of_fused_steps(optimizer, stream.parameters)
        if stream.steps.stepping is not optimizer and not stream.parameters.isdisjoint(parameters):
            stream.steps.check_optimizer(optimizer)
            stream.settle()


def _warn_of_fused_steps(optimizer: torch.optim.Optimizer, streamed: set[nn.Parameter]) -> None:
    """Before PyTorch 2.14, fused SGD on the CPU leaves most of a low-precision parameter as it was."""
    if not isinstance(optimizer, torch.optim.SGD) or torch.__version__ >= "2.14":
        return
    fused = [parameter for group in optimizer.param_groups if group.get("fused") for parameter in group["params"]]
    if any(parameter.element_size() == 2 and parameter in streamed for parameter in fused):
        warn_once(
            "SGD with fused=True skips updates of bfloat16 and float16 parameters on the CPU "
            "before PyTorch 2.14 (https://github.com/pytorch/pytorch/pull/192545), and streamed weights are stepped on "
            "the CPU; write fused=False, or update PyTorch."
        )


@cache
def warn_once(message: str) -> None:
    """Warn the first time."""
    warn_caller(message)
