"""The ways to run a training step that the suite compares, and the workloads that it compares them on."""

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import offload
from benchmarks.comparison import Attached
from benchmarks.models import Llama, Model
from benchmarks.workloads import norm_mlp, reference_decoder

LONG_TOKENS, LONG_LAYERS = 180_224, 4
"""A forward of the decoder's layer on so many tokens takes an H200 1.1 times as long as its link takes to copy what the
layer saves."""


@dataclass(frozen=True)
class Case:
    """A workload and what is compared on it."""

    name: str
    build: Callable[[torch.device], Model]
    ks: tuple[int, ...]  # numbers of layers that this library offloads
    checkpoint_ks: tuple[int, ...]  # numbers of checkpointed layers whose inputs it offloads
    te_ks: tuple[int, ...]  # numbers of layers that Transformer Engine offloads
    tokens: int | None = None
    """Length of the long sequence, whose steps take seconds: no turns are taken."""


def cases(*, small: bool = False) -> dict[str, Case]:
    """The workloads by their names on the command line; ``small`` ones fit a CPU."""
    decoder, mlp = reference_decoder(small=small), norm_mlp(small=small)
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 16, "num_attention_heads": 32}
    options: dict[str, Any] = {"tokens": 4096, "vocab_size": 2048, "dtype": torch.bfloat16}
    long = replace(decoder, layers=LONG_LAYERS, shape=(1, LONG_TOKENS, decoder.shape[2]))
    if small:
        decoder, mlp = replace(decoder, layers=4), replace(mlp, layers=4)
        sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
        options = {"tokens": 64, "vocab_size": 128, "dtype": torch.float32}
        long = replace(long, shape=(1, 256, 64))
    compiled = partial(decoder.build, compiled="aot_eager" if small else "inductor")
    most, long_loss = (LONG_LAYERS - 1,), partial(long.build, loss_is_a_layer=True)
    found = {
        "decoder": Case("decoder", decoder.build, (2, 5, 10, 14, 18), (18, 19), (5, 18)),
        "long": Case("long sequence", long_loss, most, most, most, tokens=long.shape[1]),
        "compiled": Case("compiled decoder", compiled, (5, 10, 18), (18, 19), (5, 18)),
        "llama": Case("Hugging Face Llama", partial(Llama, **options, **sizes), (4, 8, 14), (14, 15), (4, 14)),
        "norm_mlp": Case("LayerNorm-MLP", mlp.build, (2, 5, 10, 18), (18, 19), (5, 18)),
    }
    if small:
        few = {"ks": (1,), "checkpoint_ks": (2,), "te_ks": (1,)}
        found = {name: case if case.tokens else replace(case, **few) for name, case in found.items()}
    return found


@dataclass(frozen=True)
class Contender:
    """One way to run a step of any model."""

    family: str  # what its points are joined under in a picture
    label: str
    around: Callable[[Model], AbstractContextManager[Any]]
    k: int | None = None  # number of offloaded layers, for ways that have one
    package: str | None = None  # what must be installed
    pins_all: bool = False
    """Everything that autograd saves is copied to pinned memory of PyTorch's allocator: steps take many times as long
    as the others', so that clocks do not matter, and no turns are taken."""


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
def transformer_engine(model: Model, k: int, *, file: Path | None = None) -> Iterator[None]:
    """Transformer Engine's context around each layer, its sync function on each output; ``file`` as in the suite."""
    if file is not None:
        get_cpu_offload_context = load_transformer_engine(file)
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
        yield


MODULES = ("", ".debug", ".debug.pytorch", ".debug.pytorch.debug_state")
MODULES += (".pytorch", ".pytorch.cpu_offload_v1", ".pytorch.quantized_tensor")
"""Of Transformer Engine, without the package's name: what its ``cpu_offload.py`` imports."""
STAND_INS: dict[str, Any] = {
    "TEDebugState": type("TEDebugState", (), {"debug_enabled": False}),
    "QuantizedTensor": type("QuantizedTensor", (), {}),  # no tensor of the benchmarks is one
    "prepare_for_saving": lambda *tensors: (list(tensors), [None] * len(tensors)),
    "restore_from_saved": lambda _objects, tensors: tensors,
}
"""The names that it uses of them."""


def load_transformer_engine(path: Path) -> Callable[..., Any]:
    """The ``get_cpu_offload_context`` of Transformer Engine's ``cpu_offload.py``, run alone.

    None of the package's compiled code is needed to move activations: stand-ins have as much of its modules as the file
    uses for tensors that are not quantised. Afterwards, a package that is installed is found again.
    """
    package = "transformer_engine"
    spec = importlib.util.spec_from_file_location(f"{package}.pytorch.cpu_offload", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules):
        for name in MODULES:
            stand_in = ModuleType(package + name)
            vars(stand_in).update(STAND_INS, __path__=[])
            sys.modules[stand_in.__name__] = stand_in
            parent, _, last = stand_in.__name__.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, stand_in)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    context: Callable[..., Any] = module.get_cpu_offload_context
    return context


@contextmanager
def offloaded(model: Model, k: int, *, min_bytes: int, checkpoint: bool = False) -> Iterator[offload.OffloadedLayers]:
    """This library on the first k layers, or around the first k checkpointed ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"num_layers = model_layers - 1")
        schedule = offload.Schedule.default(k, len(model.layers))
    with (
        model.checkpointing() if checkpoint else nullcontext(),
        offload.offload_layers(model.layers, schedule=schedule, min_bytes=min_bytes) as handle,
    ):
        yield handle


def contenders(case: Case, *, min_bytes: int, te_file: Path | None = None) -> list[Contender]:
    """All ways to run a case: the first does nothing, and this library with the most layers is the last.

    ``te_file`` is Transformer Engine's ``cpu_offload.py``, to be run alone; ``None`` takes the package, if installed.
    """
    own = partial(offloaded, min_bytes=min_bytes)
    around = partial(own, checkpoint=True)
    te = partial(transformer_engine, file=te_file)
    te_package = None if te_file else "transformer_engine"
    return [
        Contender("nothing", "nothing", lambda _: nullcontext(), k=0),
        Contender("checkpoint", "torch.utils.checkpoint", lambda model: model.checkpointing()),
        Contender("save_on_cpu", "save_on_cpu", lambda _: save_on_cpu(pin_memory=True), pins_all=True),
        Contender("trl", "TRL OffloadActivations", trl, package="trl", pins_all=True),
        *(Contender("te", f"Transformer Engine, k = {k}", partial(te, k=k), k, te_package) for k in case.te_ks),
        Contender("checkpoint_on_cpu", "checkpoint under save_on_cpu", lambda model: model.checkpointing(on_host=True)),
        *(
            Contender("offload_checkpoint", f"this library around checkpoints, k = {k}", partial(around, k=k), k)
            for k in case.checkpoint_ks
        ),
        *(Contender("offload", f"this library, k = {k}", partial(own, k=k), k) for k in case.ks),
    ]
