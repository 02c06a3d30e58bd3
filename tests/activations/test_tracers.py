"""Tracers and transforms over layers that are offloaded: each works, or says what to do."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import NOTHING, assert_same, gradients, leaves_of, loss_of, offloading
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from offload import offload_layers
from offload.activations.stats import OffloadStats

# PyTorch's own forward-mode formulas are scripted when they are first needed.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")  # FutureWarning since torch 2.14

LAYERS = 4


class Model(nn.Module):
    """Layers, with a context around each if it has one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(LAYERS))
        self.offloading: Any = NOTHING

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.offloading.forward(self.layers, x)


class Case:
    """A model whose layers are offloaded, the same one without, and an input."""

    def __init__(self, kind: str, device: torch.device) -> None:
        self.plain = Model().to(device)
        self.model = Model().to(device)
        self.kind = kind
        self.x = torch.linspace(-1, 1, 24, device=device).view(3, 8)
        if kind == "hooks":
            self.handle = offload_layers(self.model.layers, 2, min_bytes=0)
        else:
            self.model.offloading = offloading(2, LAYERS, device)

    @property
    def stats(self) -> OffloadStats:
        return self.handle.stats() if self.kind == "hooks" else self.model.offloading.stats

    def assert_unharmed(self) -> None:
        """An ordinary step is right, and is offloaded."""
        before = self.stats
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert_same(step(self.plain, self.x), step(self.model, self.x))
        assert self.stats.offloaded_bytes > before.offloaded_bytes
        assert self.stats.late_reloads == before.late_reloads


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return gradients(leaves_of(model), lambda: loss_of(model(x)).backward())


@pytest.fixture(params=["context", "hooks"])
def case(request: pytest.FixtureRequest, device: torch.device, lab: Lab) -> Case:
    lab.adverse()
    return Case(request.param, device)


RECORDS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "jit.trace": torch.jit.trace,
    "make_fx": lambda model, x: make_fx(model)(x),
    "make_fx above autograd": lambda model, x: make_fx(model, pre_dispatch=True)(x),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
}


def operations(graph: Any) -> Counter[str]:
    """How often each operation occurs."""
    if isinstance(graph, torch.jit.ScriptModule):
        return Counter(node.kind() for node in graph.inlined_graph.nodes())
    return Counter(f"{node.op} {node.target}" for node in graph.graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS.values(), ids=list(RECORDS))
def test_recorded_without_offloading(record: Callable[[nn.Module, torch.Tensor], Any], case: Case) -> None:
    expected, found = record(case.plain, case.x), record(case.model, case.x)
    assert operations(found) == operations(expected)
    assert torch.equal(found(case.x), case.plain(case.x))
    assert case.stats.offloaded_bytes == 0
    case.assert_unharmed()


@pytest.mark.parametrize("strict", [False, True], ids=["fullgraph", "strict export"])
def test_one_graph_cannot_hold_the_copies(strict: bool, case: Case) -> None:
    remedy = {
        "hooks": r"compile without fullgraph=True, or compile each\s+layer by itself.*handle.remove\(\)",
        "context": r"OffloadContext(\.__enter__)?",
    }
    model, x = case.model, case.x
    if strict:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=remedy[case.kind]):
            torch.export.export(model, (x,), strict=True)
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=remedy[case.kind]):
            torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    case.assert_unharmed()


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 8))])
def test_layers_of_torchscript_are_refused(make: Callable[[nn.Module], Any]) -> None:
    """Their hooks would never be called."""
    layers = list(make(Model().layers[0]).children())
    with pytest.raises(
        TypeError, match=r"layers must hold modules of Python, got .*: TorchScript calls no hooks; pass"
    ):
        offload_layers(layers, 1)


def disabled(loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("not in this block, says the program."):
        return loss(x)


WITHOUT_HOOKS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], object]] = {
    "grad": lambda loss, x: torch.func.grad(loss)(x),
    "vjp": torch.func.vjp,
    "jacrev": lambda loss, x: torch.func.jacrev(loss)(x),
    "hessian": lambda loss, x: torch.func.hessian(loss)(x),
    "per sample": lambda loss, x: torch.vmap(torch.func.grad(loss))(x),
    "disabled": disabled,
}


@pytest.mark.parametrize("transform", WITHOUT_HOOKS.values(), ids=list(WITHOUT_HOOKS))
def test_without_hooks_on_saved_tensors(transform: Callable[..., object], case: Case) -> None:
    """The error says what to do, and the context is as if it had not been entered."""
    message = (
        "layer 0 must run where hooks on saved tensors are allowed if it is offloaded, but PyTorch says: .*"
        r"Take the derivative by torch.autograd, or run the layer without offloading: .* handle.remove\(\)"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            transform(lambda x: case.model(x).square().sum(), case.x)
        case.assert_unharmed()


def test_without_hooks_in_the_midst_of_a_round(device: torch.device) -> None:
    case = Case("context", device)
    context, x = case.model.offloading.context, case.x
    y = case.model.offloading.layer(case.model.layers[0], x)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here."),
        pytest.raises(RuntimeError, match="layer 1 must run"),
        context,
    ):
        raise AssertionError("the block must not be run")
    with context:
        assert context._open.layer == 1
        y = case.model.layers[1](y)
    assert context.microbatch == 0


TRANSFORMS: dict[str, Callable[[Model, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda model, x: (torch.func.jacfwd(model)(x),),
    "functionalize": lambda model, x: torch.autograd.grad(torch.func.functionalize(model)(x).sum(), model.parameters()),
    "vmap": lambda model, x: torch.autograd.grad(torch.vmap(model)(x).sum(), model.parameters()),
}


@pytest.mark.parametrize("run", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_transforms(run: Callable[[Model, torch.Tensor], tuple[torch.Tensor, ...]], case: Case) -> None:
    expected, found = run(case.plain, case.x), run(case.model, case.x)
    assert_same([tensor.detach() for tensor in expected], [tensor.detach() for tensor in found])
    case.assert_unharmed()


@pytest.mark.parametrize("run", TRANSFORMS.values(), ids=list(TRANSFORMS))
@pytest.mark.parametrize("steps", [0, 4])  # before: the layers are measured then, or follow a plan
def test_transforms_within_a_budget(run: Callable[..., tuple[torch.Tensor, ...]], steps: int, lab: Lab) -> None:
    case = Case("context", lab.device)
    model, x = Model().to(lab.device), case.x
    with offload_layers(model.layers, memory_budget="1MiB", min_bytes=0):
        for _ in range(steps):
            step(model, x)
        found = run(model, x)
        assert_same([one.detach() for one in run(case.plain, x)], [one.detach() for one in found])
        for _ in range(3):
            assert_same(step(case.plain, x), step(model, x))
