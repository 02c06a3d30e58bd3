"""The ways to run a training step that the suite compares."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

import offload
from benchmarks import transformer_engine_file
from benchmarks.models import Model
from offload.activations.context import DEFAULT_MIN_BYTES


@dataclass
class Attached:
    """A contender that has been attached to a model."""

    step: Callable[[], None]
    """One forward and backward."""
    stats: Callable[[], offload.OffloadStats] | None = None


@dataclass(frozen=True)
class Contender:
    """One way to run a step of any model."""

    family: str
    """What its points are joined under in a picture."""
    label: str
    attach: Callable[[Model], AbstractContextManager[Attached]]
    k: int | None = None
    """Number of offloaded layers, for those that choose."""
    takes_turns: bool = True
    """Whether its steps alternate with those of the others. One many times slower need not."""
    package: str | None = None
    """What must be installed."""
    pins_all: bool = False
    """Whether everything that autograd saves is copied to pinned memory of PyTorch's allocator."""


@contextmanager
def nothing(model: Model) -> Iterator[Attached]:
    """PyTorch as it is."""
    yield Attached(model.step)


@contextmanager
def checkpointed(model: Model, *, on_host: bool = False) -> Iterator[Attached]:
    """Each layer saves its input, on the device or on the host, and is computed again in backward."""
    with model.checkpointing(on_host=on_host):
        yield Attached(model.step)


@contextmanager
def saved_on_cpu(model: Model) -> Iterator[Attached]:
    """PyTorch's hooks that copy every saved tensor, on the compute stream."""

    def step() -> None:
        with save_on_cpu(pin_memory=True):
            loss = model.loss()
        loss.backward()

    yield Attached(step)


@contextmanager
def trl(model: Model) -> Iterator[Attached]:
    """TRL's hooks, around forward and backward as its trainers have them."""
    from trl.models.activation_offloading import OffloadActivations

    hooks = OffloadActivations()
    hooks.update_model_params(model.module)

    def step() -> None:
        with hooks:
            model.step()

    yield Attached(step)


@contextmanager
def transformer_engine(model: Model, k: int, *, file: Path | None = None) -> Iterator[Attached]:
    """Transformer Engine's context around each layer, and its sync function on each output.

    Args:
        model: What is trained.
        k: Number of layers that it offloads.
        file: Its ``cpu_offload.py``, where it is not installed.
    """
    if file is not None:
        get_cpu_offload_context = transformer_engine_file.load(file)
    else:
        from transformer_engine.pytorch import get_cpu_offload_context

    context, sync = get_cpu_offload_context(
        enabled=True, num_layers=k, model_layers=len(model.layers), offload_activations=True, offload_weights=False
    )

    inside = False

    def enter(_module: nn.Module, _args: object) -> None:
        nonlocal inside
        inside = True
        context.__enter__()

    def leave(_module: nn.Module, _args: object, output: Any) -> Any:
        nonlocal inside
        context.__exit__(None, None, None)
        inside = False
        return sync(output)

    hooks = [layer.register_forward_pre_hook(enter) for layer in model.layers]
    hooks += [layer.register_forward_hook(leave) for layer in model.layers]
    try:
        yield Attached(model.step)
    finally:
        if inside:  # it failed on the way, and would leave its hooks to the next contender
            context.__exit__(None, None, None)
        for hook in hooks:
            hook.remove()


@contextmanager
def offloaded(model: Model, k: int, *, min_bytes: int, checkpoint: bool = False) -> Iterator[Attached]:
    """This library on the first k layers, or around the first k checkpointed ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"num_layers = model_layers - 1")
        schedule = offload.Schedule.default(k, len(model.layers))
    if checkpoint:
        with model.checkpointing(), offload.offload_layers(model.layers, schedule=schedule, min_bytes=min_bytes) as own:
            yield Attached(model.step, own.stats)
        return
    with offload.offload_layers(model.layers, schedule=schedule, min_bytes=min_bytes) as own:
        yield Attached(model.step, own.stats)


def contenders(
    ks: Sequence[int],
    checkpoint_ks: Sequence[int],
    *,
    te_ks: Sequence[int] = (),
    te_file: Path | None = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
) -> list[Contender]:
    """All contenders: the first does nothing, and this library comes at several k, the most at the end.

    Args:
        ks: Numbers of layers that this library offloads.
        checkpoint_ks: Numbers of checkpointed layers whose inputs it offloads.
        te_ks: Numbers of layers that Transformer Engine offloads.
        te_file: Its ``cpu_offload.py``, to be run alone; ``None`` takes the package, if it is installed.
        min_bytes: Storages below this size stay on the device with this library, in bytes.
    """
    own = partial(offloaded, min_bytes=min_bytes)
    te = partial(transformer_engine, file=te_file)
    te_package = None if te_file else transformer_engine_file.PACKAGE
    return [
        Contender("nothing", "nothing", nothing, k=0),
        Contender("checkpoint", "torch.utils.checkpoint", checkpointed),
        Contender("save_on_cpu", "save_on_cpu", saved_on_cpu, takes_turns=False, pins_all=True),
        Contender("trl", "TRL OffloadActivations", trl, takes_turns=False, package="trl", pins_all=True),
        *(Contender("te", f"Transformer Engine, k = {k}", partial(te, k=k), k, package=te_package) for k in te_ks),
        Contender("checkpoint_on_cpu", "checkpoint under save_on_cpu", partial(checkpointed, on_host=True)),
        *(
            Contender(
                "offload_checkpoint",
                f"this library around checkpoints, k = {k}",
                partial(own, k=k, checkpoint=True),
                k,
            )
            for k in checkpoint_ks
        ),
        *(Contender("offload", f"this library, k = {k}", partial(own, k=k), k) for k in ks),
    ]
