"""The ways to run a training step that the suite compares."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

import offload
from benchmarks import transformer_engine_file
from benchmarks.cases import Case
from benchmarks.models import Model


@dataclass
class Attached:
    """A way that has been attached to a model."""

    step: Callable[[], object]
    """One forward and backward."""
    stats: Callable[[], offload.OffloadStats] | None = None

    def __call__(self) -> None:
        self.step()


@dataclass(frozen=True)
class Way:
    """One way to run a step of any model."""

    family: str
    """What its points are joined under in a picture."""
    label: str
    attach: Callable[[Model], AbstractContextManager[Attached]]
    k: int | None = None
    """Number of offloaded layers, for ways that have one."""
    slow: bool = False
    """Steps take many times as long as the others', so that clocks do not matter, and no turns are taken."""
    package: str | None = None
    """What must be installed."""
    pins_all: bool = False
    """Everything that autograd saves is copied to pinned memory of PyTorch's allocator."""


@contextmanager
def nothing(model: Model) -> Iterator[Attached]:
    """PyTorch as it is."""
    yield Attached(model.step)


@contextmanager
def checkpointed(model: Model, *, on_host: bool = False) -> Iterator[Attached]:
    """Each layer saves its input, on the device or on the host, and is recomputed in backward."""
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
    """Transformer Engine's context around each layer, its sync function on each output; ``file`` as in the suite."""
    if file is not None:
        get_cpu_offload_context = transformer_engine_file.load(file)
    else:
        from transformer_engine.pytorch import get_cpu_offload_context

    context, sync = get_cpu_offload_context(
        enabled=True, num_layers=k, model_layers=len(model.layers), offload_activations=True, offload_weights=False
    )
    entered = ExitStack()  # of a layer whose forward fails, it would leave its hooks to the next contender

    def enter(_module: nn.Module, _args: object) -> None:
        entered.enter_context(context)

    def leave(_module: nn.Module, _args: object, output: Any) -> Any:
        entered.close()
        return sync(output)

    with entered, ExitStack() as hooks:
        for layer in model.layers:
            hooks.callback(layer.register_forward_pre_hook(enter).remove)
            hooks.callback(layer.register_forward_hook(leave).remove)
        yield Attached(model.step)


@contextmanager
def offloaded(model: Model, k: int, *, min_bytes: int, checkpoint: bool = False) -> Iterator[Attached]:
    """This library on the first k layers, or around the first k checkpointed ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"num_layers = model_layers - 1")
        schedule = offload.Schedule.default(k, len(model.layers))
    with ExitStack() as stack:
        if checkpoint:
            stack.enter_context(model.checkpointing())
        own = stack.enter_context(offload.offload_layers(model.layers, schedule=schedule, min_bytes=min_bytes))
        yield Attached(model.step, own.stats)


def ways(case: Case, *, min_bytes: int, te_file: Path | None = None) -> list[Way]:
    """All ways to run a case: the first does nothing, and this library with the most layers is the last.

    Args:
        case: Says with which numbers of layers.
        min_bytes: Storages below this size, in bytes, stay on the device with this library.
        te_file: Transformer Engine's ``cpu_offload.py``, to be run alone; ``None`` takes the package, if installed.
    """
    own = partial(offloaded, min_bytes=min_bytes)
    around = partial(own, checkpoint=True)
    te = partial(transformer_engine, file=te_file)
    te_package = None if te_file else transformer_engine_file.PACKAGE
    return [
        Way("nothing", "nothing", nothing, k=0),
        Way("checkpoint", "torch.utils.checkpoint", checkpointed),
        Way("save_on_cpu", "save_on_cpu", saved_on_cpu, slow=True, pins_all=True),
        Way("trl", "TRL OffloadActivations", trl, slow=True, package="trl", pins_all=True),
        *(Way("te", f"Transformer Engine, k = {k}", partial(te, k=k), k, package=te_package) for k in case.te_ks),
        Way("checkpoint_on_cpu", "checkpoint under save_on_cpu", partial(checkpointed, on_host=True)),
        *(
            Way("offload_checkpoint", f"this library around checkpoints, k = {k}", partial(around, k=k), k)
            for k in case.checkpoint_ks
        ),
        *(Way("offload", f"this library, k = {k}", partial(own, k=k), k) for k in case.ks),
    ]
