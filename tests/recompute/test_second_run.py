"""What each second run of a layer is checked against: without the check, one of these tests fails."""

import collections
import contextlib
import gc
import logging
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from faults import in_threads
from lab import Lab
from models import WIDTH, Composed, Seen, assert_same, build, gradients, leaves_of, loss_of, through
from test_policies import ALL, Function, assert_bits, assert_right, offloaded
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import offload
from offload.recompute import layer_policies, run_again
from offload.recompute.run_again import HandOver

pytestmark = pytest.mark.usefixtures("recomputes")

LAYERS = 3
ADD = {"add": "keep", "*": "recompute"}
MUL = {"mul": "keep", "*": "recompute"}


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """Fill new memory with NaN: memory in place of a result that was skipped holds the right values by no chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def functions(function: Callable[..., Any], lab: Lab) -> tuple[nn.ModuleList, torch.Tensor]:
    return build(lambda: Function(function), LAYERS, lab.device)


def step(
    layers: nn.ModuleList, x: torch.Tensor, between: Callable[[], object] = lambda: None, seed: int = 0
) -> list[torch.Tensor]:
    """Gradients of a step; ``between`` is called between forward and backward."""

    def run() -> None:
        torch.manual_seed(seed)
        loss = loss_of(through(layers, x))
        between()
        loss.backward()

    return gradients(leaves_of(layers, x), run)


class Way:
    """Decides what a layer does, where the library cannot see it."""

    def __init__(self) -> None:
        self.now = 0

    def turn(self) -> None:
        self.now = 1 - self.now


def _other_order(x: torch.Tensor, w: torch.Tensor, way: int) -> torch.Tensor:
    if way:
        read, unread = x * 2, x + 1
    else:
        unread, read = x + 1, x * 2
    return read.sin() - unread


def _swapped_branches(x: torch.Tensor, w: torch.Tensor, way: int) -> torch.Tensor:
    kept, dropped = x + 1, x + 2
    if way:
        kept, dropped = dropped, kept
    return kept.sin() - dropped.sin() * 0.5


def _fewer_saved(x: torch.Tensor, w: torch.Tensor, way: int) -> torch.Tensor:
    y = (x + 1).sin().tanh()
    return y if way else y.sin()


def _other_autocast(x: torch.Tensor, w: torch.Tensor, way: int) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.float16 if way else torch.bfloat16):
        y = x @ w
    return (y.tanh() * 2).cos().float()


@pytest.mark.parametrize(
    ("function", "policies", "ways"),
    [
        (_other_order, ALL, [0, 0, 1, 1, 0]),
        (_swapped_branches, ADD, [0, 0, 1, 1, 0]),
        (_fewer_saved, ALL, [0, 0, 1, 1, 1, 0]),
        (_fewer_saved, ADD, [0, 0, 1, 1, 1, 0]),
        (_other_autocast, {"*mm": "keep", "*": "recompute"}, [0, 0, 1, 0, 1]),
    ],
)
def test_a_forward_that_goes_another_way(
    function: Callable[..., torch.Tensor], policies: dict[str, str], ways: list[int], lab: Lab, unplanned: set[str]
) -> None:
    if function is _swapped_branches:
        unplanned.add("handing over gave other bits")  # the last forward, which is compared, goes another way
    way = Way()
    layers, x = functions(lambda x, w: function(x, w, way.now) * w.mean(), lab)
    expected = {}
    for way.now in (0, 1):
        expected[way.now] = step(layers, x)
    with offloaded(layers, lab, policies) as handle:
        for way.now in ways:
            assert_same(expected[way.now], step(layers, x))
        assert "recompute" in handle.regions(0).values()


def test_layers_that_some_forwards_leave_out(lab: Lab) -> None:
    """As LayerDrop does."""
    layers, x = build("gpt", LAYERS, lab.device)
    some = [nn.ModuleList(layers[number] for number in numbers) for numbers in ((0, 1, 2), (0, 2), (1,), (2,), (0, 1))]
    expected = [step(one, x) for one in some]
    with offloaded(layers, lab) as handle:
        for time in range(3 * len(some)):
            assert_same(expected[time % len(some)], step(some[time % len(some)], x))
        assert "recompute" in handle.regions(2).values()


def _catches(x: torch.Tensor, way: int) -> torch.Tensor:
    try:
        return x - -1 if way else x + 1
    except Exception:  # noqa: BLE001  as a layer may do it
        return x


def _goes_on_in_order(x: torch.Tensor, w: torch.Tensor, way: int) -> torch.Tensor:
    return _catches(x, way).sin().tanh() - (x * 2).sin()


def _goes_on_as_data_decides(x: torch.Tensor, w: torch.Tensor, way: int) -> torch.Tensor:
    y = _catches(x, way)
    x.detach() * 2  # is skipped
    return y[y > -9].view_as(y).sin()


@pytest.mark.parametrize(
    ("function", "policies", "runs"),
    [(_other_order, ALL, 2), (_goes_on_in_order, MUL, 1), (_goes_on_as_data_decides, ALL, 2)],
)
def test_a_layer_that_goes_another_way_in_backward_is_learned_anew(
    function: Callable[..., torch.Tensor], policies: dict[str, str], runs: int, lab: Lab, unplanned: set[str]
) -> None:
    """Until it is known to do so each time: then nothing is handed over. The layer runs once in backward, or never."""
    way, calls = Way(), [0]

    def counts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return function(x, w, way.now) * w.mean()

    layers, x = functions(counts, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, policies):
        for _ in range(12):
            calls[0] = way.now = 0
            assert_same(expected, step(layers, x, way.turn))
    assert calls[0] == runs * LAYERS


# What the second run saves, where something unknown decides the way of forward.


def _another_node(x: torch.Tensor, way: int) -> torch.Tensor:
    return (x + 1 if way == 0 else x + 0.5 + 1).sin()


def _another_shape(x: torch.Tensor, way: int) -> torch.Tensor:
    return (x[..., : 2 - way] + 1).sin().sum() * x


def _another_dtype(x: torch.Tensor, way: int) -> torch.Tensor:
    y = x.to(torch.float64 if way == 0 else torch.float16)
    return y.sin().float()


def _more_saved(x: torch.Tensor, way: int) -> torch.Tensor:
    y = x * 2
    return y.sin() if way == 0 else y.sin().tanh()


def _other_values(x: torch.Tensor, way: int) -> torch.Tensor:
    return (x * 2 if way == 0 else x + 2).sin().tanh()


def _saves_more_behind_another_operation(x: torch.Tensor, way: int) -> torch.Tensor:
    """The operation lets the layer be run again without handing over, to its end."""
    if way:
        x.detach() + 1
    y = (x * 2).sin() - (x + 1).sin()
    return y.tanh() if way else y


@pytest.mark.parametrize(
    ("function", "policies", "first", "words"),
    [
        (_another_node, ALL, 0, "makes other operations before saved tensor"),
        (_another_shape, ALL, 0, "saves torch.float32 .* as tensor"),
        (_another_dtype, ALL, 0, "saves torch.float16 .* as tensor"),
        (_more_saved, ALL, 1, "saves fewer tensors"),
        (_other_values, MUL, 0, "computes other values as saved tensor"),
        (_saves_more_behind_another_operation, MUL, 0, "saves more tensors"),
    ],
)
def test_a_second_run_that_is_not_the_first_raises(
    function: Callable[[torch.Tensor, int], torch.Tensor], policies: dict[str, str], first: int, words: str, lab: Lab
) -> None:
    way = Way()
    way.now = first
    layers, x = functions(lambda x, w: function(x, way.now), lab)
    expected = step(layers, x)
    with offloaded(layers, lab, policies):
        for _ in range(2):
            assert_same(expected, step(layers, x))
        with pytest.raises(RuntimeError, match=f"Function cannot be recomputed: run again in backward, it {words}"):
            step(layers, x, way.turn)
        way.now = first
        assert_same(expected, step(layers, x))


CONSTANT = [torch.zeros(())]


class Shifted(nn.Module):
    """Reads a parameter, a buffer, an attribute, a list of tensors and a global, none of which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("buffer", torch.zeros(WIDTH))
        self.attribute = torch.zeros(())
        self.listed = [torch.zeros(())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight + self.bias + self.buffer + self.attribute + self.listed[0] + CONSTANT[0]).sin()


def compiled(layers: nn.ModuleList) -> nn.ModuleList:
    """By a compiler that runs what it has traced as it is."""
    for layer in layers:
        layer.compile(backend="eager")
    return layers


@pytest.mark.parametrize(
    ("name", "what", "how"),
    [
        ("bias", "a parameter of shape .*", nn.ModuleList),
        ("bias", "a parameter of shape .*", compiled),
        ("buffer", ".*", nn.ModuleList),
        ("attribute", ".*", nn.ModuleList),
        ("listed", ".*", nn.ModuleList),
        ("constant", "a tensor", nn.ModuleList),
    ],
)
def test_what_is_read_and_changed_before_backward(name: str, what: str, how: Callable[..., Any], lab: Lab) -> None:
    CONSTANT[0] = torch.zeros(())
    layers, x = build(Shifted, LAYERS, lab.device)
    layers = how(layers)
    expected = step(layers, x)
    with offloaded(layers, lab):
        for _ in range(2):
            assert_same(expected, step(layers, x))
        found = CONSTANT if name == "constant" else getattr(layers[0], name)
        tensor = (found[0] if isinstance(found, list) else found).detach()
        with pytest.raises(RuntimeError, match=f"{what}, which the recomputation of Shifted reads, is at version 1"):
            step(layers, x, lambda: tensor.add_(1))


def test_a_parameter_is_changed_before_backward_under_a_budget(lab: Lab) -> None:
    layers, x = build(Shifted, LAYERS, lab.device)
    expected = step(layers, x)
    with offload.offload_layers(layers, memory_budget="1GiB", min_bytes=0, device=lab.device) as handle:
        assert_same(expected, step(layers, x))
        assert handle.state == "measuring"  # while everything is recomputed
        with pytest.raises(RuntimeError, match=r"a parameter .*, which the recomputation of Shifted reads"):
            step(layers, x, lambda: layers[0].bias.detach().add_(1))


def test_a_parameter_that_is_frozen_before_backward(lab: Lab) -> None:
    layers, x = build("gpt", LAYERS, lab.device)
    with offloaded(layers, lab):
        step(layers, x)
        with pytest.raises(RuntimeError, match="such as a parameter's requires_grad"):
            step(layers, x, lambda: layers.requires_grad_(requires_grad=False))


class Added(nn.Module):
    """Adds a parameter last, which has its gradient before backward asks for what was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos() + self.bias


class AddedLate(Added):
    """What is dropped is computed from the parameter as well, where autograd does not see it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.bias.detach()).sin().cos() + self.bias


@pytest.mark.parametrize("arguments", [{"num_layers": 0, "policies": ALL}, {"memory_budget": "1GiB"}])
def test_a_parameter_that_is_stepped_before_the_layer_runs_again(arguments: dict[str, Any], lab: Lab) -> None:
    def losses(layer: type[nn.Module], **given: Any) -> list[torch.Tensor]:
        layers, x = build(layer, LAYERS, lab.device)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        with contextlib.ExitStack() as stack:
            if given:
                stack.enter_context(offload.stream_optimizer(optimizer, chunk_bytes=1, in_backward=True))
                stack.enter_context(offload.offload_layers(layers, min_bytes=0, device=lab.device, **given))
            found = []
            for _ in range(4):
                optimizer.zero_grad()
                found.append(loss_of(through(layers, x)))
                found[-1].backward()
                optimizer.step()
        return found

    assert_same(losses(Added), losses(Added, **arguments))
    with (
        pytest.raises(RuntimeError, match="which the recomputation of AddedLate reads, is at version"),
        pytest.warns(UserWarning, match="must belong to one step, but backward was cut off"),
    ):
        losses(AddedLate, **arguments)


@pytest.mark.usefixtures("nothing_recomputed")
def test_a_tensor_from_outside_that_forward_writes(lab: Lab, unplanned: set[str]) -> None:
    """A tensor that is neither argument nor attribute is not put back for a second run: there is none."""
    calls = torch.zeros((), device=lab.device)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.add_(1)
        return (x * w.mean()).sin()

    unplanned.add("is never recomputed")
    layers, x = functions(function, lab)
    expected = step(layers, x)
    calls.zero_()
    with offloaded(layers, lab) as handle:
        for count in (1, 2, 3):
            assert_same(expected, step(layers, x))
            assert calls.item() == LAYERS * count
        assert handle.regions(0)["mul"] == "offload"


# Functions that choose another way where a dispatch mode is active, as in the forward that is learned.


def test_a_function_that_computes_other_bits_under_a_mode(lab: Lab, unplanned: set[str]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = x + 1
        return kept.sin() * (x * (1 + _modes() * 2**-10)).cos() * w.mean()

    unplanned.add("handing over gave other bits")
    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, ADD) as handle:
        step(layers, x)  # is learned under a mode, and computes other bits
        for _ in range(3):
            assert_same(expected, step(layers, x))
        assert "recompute" in handle.regions(0).values()


def test_a_function_that_saves_other_tensors_under_a_mode(lab: Lab) -> None:
    """As :func:`torch.nn.functional.ctc_loss` does, which is here in both ways."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w.mean()
        y = -(-y).sin() if _modes() else y.sin()  # the same bits
        lengths = torch.full((x.shape[0],), x.shape[1])
        targets = torch.ones(x.shape[0], 1, dtype=torch.long)
        likely = y.transpose(0, 1).log_softmax(-1).cpu()  # on a GPU, the gradient of ctc_loss is not deterministic
        return y * F.ctc_loss(likely, targets, lengths, torch.ones_like(lengths)).to(y.device)

    layers, x = functions(function, lab)
    assert_bits(partial(step, layers, x), layers, lab, times=6)


def _modes() -> int:
    return len(_get_current_dispatch_mode_stack())


def _is_called_by(name: str) -> bool:
    return name in {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}


@pytest.fixture
def one_rank(lab: Lab) -> Iterator[None]:
    backend, store = "gloo" if lab.device.type == "cpu" else "nccl", torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_collectives_run_once(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """What depends on them is not recomputed, and a second run that goes another way would communicate, alone.

    What has been sent may be held for long, as it is until all ranks have it.
    """
    way, works = Way(), list[Any]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if way.now:
            x.detach() + 1
        y = (x * 2).sin()
        total = y.detach().mean()
        works.append(torch.distributed.all_reduce(total, async_op=True))
        works[-1].wait()
        return (y * total).tanh() * w.mean() - (x + 1).sin()

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab) as handle:
        for _ in range(3):
            assert_same(expected, step(layers, x))
        assert handle.regions(0)["mean"] == "offload"
        assert handle.regions(0)["tanh"] == "recompute"
        assert len([line for line in caplog.messages if "layer 1 does not recompute mean:" in line]) == 1
        with pytest.raises(RuntimeError, match="would communicate once more"):
            step(layers, x, way.turn)


@pytest.mark.usefixtures("one_rank", "nothing_recomputed")
def test_collectives_run_once_where_the_device_has_no_memory_to_prove_a_second_run(lab: Lab) -> None:
    """Backward, which may run them on other ranks at another time, does not prove it either."""
    works = list[Any]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if _is_called_by("prove_hand_over"):
            raise torch.OutOfMemoryError("no memory is left for a second run")
        total = x.detach().mean()
        works.append(torch.distributed.all_reduce(total))
        return (x * total).tanh() * w.mean()

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab):
        for _ in range(3):
            works.clear()
            assert_same(expected, step(layers, x))
        assert len(works) == LAYERS


@pytest.mark.usefixtures("one_rank")
def test_a_collective_that_nothing_dropped_needs_is_not_run_again(lab: Lab) -> None:
    """Also where all that the layer saves is recomputed."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x.detach().mean())  # as a layer counts something
        return x.sin().tanh() * w.mean()

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab) as handle:
        for _ in range(3):
            assert_same(expected, step(layers, x))
        assert set(handle.regions(0).values()) <= {"recompute", "keep"}
        y = through(layers, x)
        with Seen() as seen:
            loss_of(y).backward()
        assert seen.times["sin"] == LAYERS
        assert not seen.times["allreduce_"]


class Switched(nn.Module):
    """Reads its mode, an inner dropout's probability, a switch and a scale."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.dropout = nn.Dropout(0.5)
        self.adapter = True
        self.scale = torch.tensor(2.0, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(x * self.weight)
        if self.adapter:
            y = y * (2 if hasattr(self, "more") else 3)
        return (y * self.scale).sin() + (0.0 if self.training else 1.0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "mode": lambda layer: layer.eval(),
    "probability": lambda layer: setattr(layer.dropout, "p", 0.1),
    "switch": lambda layer: setattr(layer, "adapter", False),
    "another tensor": lambda layer: setattr(layer, "scale", torch.tensor(5.0)),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(WIDTH))),
    "a new attribute": lambda layer: setattr(layer, "more", 1),
}


@pytest.mark.parametrize(
    ("change", "how"),
    [*((one, nn.ModuleList) for one in CHANGES.values()), (CHANGES["switch"], compiled)],
    ids=[*CHANGES, "switch of a compiled layer"],
)
def test_attributes_are_those_of_the_forward(
    change: Callable[[Any], object], how: Callable[..., Any], lab: Lab
) -> None:
    layers, x = build(partial(Switched, lab.device), LAYERS, lab.device)
    layers = how(layers)
    leaves = leaves_of(layers, x)

    def run(between: Callable[[], object]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        loss = loss_of(through(layers, x))
        between()
        return gradients(leaves, loss.backward)

    expected = run(lambda: None)
    with offloaded(layers, lab) as handle:
        for _ in range(2):
            assert_same(expected, run(lambda: None))
        assert_same(expected, run(lambda: [change(layer) for layer in layers]))
        assert "recompute" in handle.regions(0).values()
    for layer in layers:
        after = Switched()
        change(after)
        assert layer.training == after.training
        assert layer.dropout.training == after.dropout.training
        assert layer.dropout.p == after.dropout.p
        assert layer.adapter == after.adapter
        assert layer.scale.item() == after.scale.item()
        assert torch.equal(layer.weight.cpu(), after.weight)
        assert hasattr(layer, "more") == hasattr(after, "more")


def test_other_weights_of_a_functional_call(lab: Lab) -> None:
    layers, x = build(partial(Switched, lab.device), 1, lab.device)
    others = {"weight": torch.rand(WIDTH, device=lab.device, requires_grad=True)}

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        y = torch.func.functional_call(layers[0], others, (x,))
        return gradients([x, others["weight"]], lambda: loss_of(y).backward())

    mine = layers[0].weight
    assert "recompute" in assert_bits(run, layers, lab).values()
    assert layers[0].weight is mine


def normed() -> nn.Module:
    """Batch norm, a spectral norm and a sign that changes back and forth: all are written in forward."""
    return Composed(
        lambda own, x: own.norm(own.linear(x)).tanh() * x * own.sign.neg_().clone(),
        linear=nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        norm=nn.BatchNorm1d(8),
        sign=nn.Buffer(torch.ones(())),
    )


@pytest.mark.parametrize("policies", [ALL, {"norm: *": "keep", "*": "recompute"}], ids=["all", "the norm is kept"])
def test_buffers_that_forward_writes(policies: dict[str, str], lab: Lab) -> None:
    """Each of two microbatches sees the buffers as its forward saw them."""

    def run(layers: nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
        other = (x * 0.5).detach().requires_grad_()

        def both() -> None:
            losses = []
            for given in (x, other):
                y = through(layers, given)
                losses.append(loss_of(y))
            for loss in losses:
                loss.backward()

        found = gradients(leaves_of(layers, x, other), both)
        return [*found, *[buffer.clone() for buffer in layers.buffers()]]

    (plain, x), (layers, _) = (build(normed, LAYERS, lab.device) for _ in range(2))
    with offloaded(layers, lab, policies) as handle:
        for _ in range(4):
            assert_same(run(plain, x), run(layers, x))
        # The norm's result is not saved: what is computed from it is kept in its place.
        assert handle.regions(0)["tanh"] == policies.get("norm: *", "recompute")
        assert "recompute" in handle.regions(0).values()


class Dropped(nn.Module):
    """Leaves out the part that writes into its buffers: as random numbers say, or as a flag does."""

    def __init__(self, by_flag: bool, reads: bool) -> None:
        super().__init__()
        self.by_flag, self.reads, self.leaves_out = by_flag, reads, False
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 1.5).sin() * (self.average.clone() if self.reads else 2)
        if self.leaves_out if self.by_flag else torch.rand(()) < (0.9 if self.leaves_out else 0.1):
            return y.cos()
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.linear(y.cos()).tanh()


@pytest.mark.parametrize("policies", [ALL, {"sin": "keep", "*": "recompute"}], ids=["all", "a sine is kept"])
@pytest.mark.parametrize("at_first", [False, True])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("by_flag", [False, True], ids=["by data", "by a flag"])
def test_buffers_that_some_forwards_write(
    by_flag: bool, reads: bool, at_first: bool, policies: dict[str, str], lab: Lab
) -> None:
    """Or an error, where a forward writes what the learned one reads."""
    torch.manual_seed(0)
    plain, layers = (nn.ModuleList(Dropped(by_flag, reads) for _ in range(LAYERS)).to(lab.device) for _ in range(2))
    layers.load_state_dict(plain.state_dict())
    x = torch.randn(2, 8, WIDTH, device=lab.device, requires_grad=True)

    def run(layers: nn.ModuleList, number: int) -> list[torch.Tensor]:
        for layer in layers:
            layer.leaves_out = at_first if number < 2 else number % 2 == 0
        found = step(layers, x)
        return [*found, *[buffer.clone() for buffer in layers.buffers()]]

    refused = by_flag and reads and at_first
    with offloaded(layers, lab, policies) as handle:
        for number in range(3 if refused else 6):
            assert_same(run(plain, number), run(layers, number))
        if refused:
            with pytest.raises(RuntimeError, match="a buffer 'average' of shape"):
                run(layers, 3)
        assert "recompute" in handle.regions(0).values()


class Balanced(nn.Module):
    """Leaves a part of the loss behind, as routers of experts do, and an average that it reads in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.balance: torch.Tensor | None = None
        self.average = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.weight).sin()
        self.balance = y.tanh().mean()
        self.average = self.average * 0.5 + y.detach().square().mean()
        return y * x * self.average


@pytest.mark.parametrize("policies", [ALL, {"sin": "keep", "*": "recompute"}], ids=["all", "a sine is kept"])
def test_what_forward_leaves_behind(policies: dict[str, str], lab: Lab) -> None:
    """It is of forward's own graph, although a second run computes an equal number."""
    (plain, x), (layers, _) = (build(Balanced, LAYERS, lab.device) for _ in range(2))

    def run(layers: nn.ModuleList) -> list[torch.Tensor]:
        def forward_and_backward() -> None:
            y = through(layers, x)
            left = [layer.balance for layer in layers]
            (loss_of(y) + sum(left)).backward()
            assert all(layer.balance is one for layer, one in zip(layers, left, strict=True))

        return gradients(leaves_of(layers, x), forward_and_backward)

    with offloaded(layers, lab, policies) as handle:
        for _ in range(4):
            assert_same(run(plain), run(layers))
        assert handle.regions(0)["sin"] == policies.get("sin", "recompute")
        assert handle.regions(0)["tanh"] == "recompute"


def high_water() -> nn.Module:
    """Keeps the largest mean that it has seen: most forwards write into the buffer what the buffer holds already."""

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.maximum(own.mark, x.mean(), out=own.mark)
        return (x * own.weight * own.mark.clone()).tanh() * x

    return Composed(forward, weight=nn.Parameter(torch.rand(WIDTH)), mark=nn.Buffer(torch.ones(())))


@pytest.mark.parametrize("policies", [ALL, MUL], ids=["all", "products kept"])
def test_a_write_that_changes_nothing_while_it_is_learned(policies: dict[str, str], lab: Lab) -> None:
    (plain, x), (layers, _) = (build(high_water, LAYERS, lab.device) for _ in range(2))
    with offloaded(layers, lab, policies) as handle:
        for factor in (0.1, 2.0, 3.0):
            given = (x * factor).detach().requires_grad_()
            assert_same(step(plain, given), step(layers, given))
            assert all(map(torch.equal, plain.buffers(), layers.buffers()))
        assert "recompute" in handle.regions(0).values()


def _settings() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled() if torch.is_autocast_enabled("cpu") else None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.empty(()).device,
    )


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic(mode: bool, warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def _precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)


class OtherSine(TorchFunctionMode):
    """As libraries exchange functions of PyTorch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if function is torch.sin else function)(*args, **kwargs or {})


SETTINGS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "default dtype": _default_dtype,
    "not deterministic": lambda: _deterministic(False, False),
    "warn only": lambda: _deterministic(True, True),
    "math": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "meta": lambda: torch.device("meta"),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False, deterministic=True, benchmark=True),
    "mkldnn": _without_mkldnn,
    "precision": _precision,
    "mode": OtherSine,
    "meta in a mode": lambda: _both(OtherSine(), torch.device("meta")),
}


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


class SineInBackward(torch.autograd.Function):
    """Its backward runs under the settings around backward, also behind a second run of its layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.sin(x)


@pytest.mark.parametrize("policies", [ALL, ADD], ids=["all", "a sum is kept"])
@pytest.mark.parametrize("around_backward", [False, True], ids=["around forward", "around backward"])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
def test_settings_are_those_of_the_forward(
    setting: Callable[[], Any], around_backward: bool, policies: dict[str, str], lab: Lab
) -> None:
    seen: list[tuple[Any, ...]] = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append(_settings())
        return SineInBackward.apply(torch.sin(F.scaled_dot_product_attention(x, x + 1, x + 2) @ w).float() * x)

    layers, x = functions(function, lab)

    def run() -> list[torch.Tensor]:
        with contextlib.nullcontext() if around_backward else setting():
            y = through(layers, x)
        loss = loss_of(y)
        with setting() if around_backward else contextlib.nullcontext():
            before = _settings()
            found = gradients(leaves_of(layers, x), loss.backward)
            assert _settings() == before
        return found

    expected = run()
    with offloaded(layers, lab, policies):
        for _ in range(3):
            seen.clear()
            assert_same(expected, run())
            assert len(seen) >= 2 * LAYERS
            assert len(set(seen)) == 1


def test_what_each_default_device_makes_of_a_layer_is_learned_once(lab: Lab) -> None:
    runs = list[torch.device]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs.append(torch.get_default_device())
        y = (x @ w).sin()
        return (y.cos().mul(2) if runs[-1].type == "meta" else y.exp()).tanh()

    layers, x = functions(function, lab)

    def run(kind: str) -> list[torch.Tensor]:
        with torch.device(kind):
            return step(layers, x)

    expected = {kind: run(kind) for kind in ("cpu", "meta")}
    with offloaded(layers, lab):
        for kind in ("cpu", "meta", "cpu"):
            runs.clear()
            assert_same(expected[kind], run(kind))
    assert len(runs) == 2 * LAYERS


def test_a_precision_that_one_backend_has_around_forward(lab: Lab) -> None:
    """Then PyTorch tells none for all backends."""
    layers, x = build("decoder", LAYERS, lab.device)
    options = torch.backends.mkldnn.matmul
    before = options.fp32_precision
    with offloaded(layers, lab) as handle:
        for _ in range(2):
            options.fp32_precision = "bf16"
            try:
                with pytest.raises(RuntimeError, match="precision"):
                    torch.get_float32_matmul_precision()
                y = through(layers, x)
            finally:
                options.fp32_precision = before
            loss_of(y).backward()
        assert "recompute" in handle.regions(0).values()
    assert torch.get_float32_matmul_precision() == "highest"


def test_autocast_inside_the_layer_keeps_casts_where_another_surrounds_it(lab: Lab) -> None:
    """The second microbatch uses the casts of the first, and the second run in backward makes them anew."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(lab.device.type, torch.bfloat16):
            return ((x @ w).tanh() + x.sin() @ w).float() * x

    layers, x = functions(function, lab)

    def run() -> None:
        with torch.autocast(lab.device.type, torch.bfloat16, enabled=False):
            outputs = []
            for given in (x, x * 0.5):
                y = through(layers, given)
                outputs.append(y)
        for output in outputs:
            loss_of(output).backward()

    assert "recompute" in assert_bits(partial(gradients, leaves_of(layers, x), run), layers, lab).values()


def _given_generator(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=generator, device=x.device)
        more = torch.rand(x.shape, generator=generator, device=x.device)
        return ((x @ w) * noise).tanh() * (x + more).sin()

    return function


RAND = {"rand": "keep", "*": "recompute"}


@pytest.mark.parametrize("policies", [ALL, RAND], ids=["all", "first numbers kept"])
@pytest.mark.parametrize("given", [False, True], ids=["default", "given"])
def test_generators(given: bool, policies: dict[str, str], lab: Lab) -> None:
    """The second run draws the same numbers, and leaves the generators as they were before it."""
    default = torch.default_generator if lab.device.type == "cpu" else torch.cuda.default_generators[0]
    generator = torch.Generator(lab.device) if given else default
    layers, x = functions(_given_generator(generator), lab)

    def run() -> list[torch.Tensor]:
        """Three steps, the numbers of which follow one another."""
        generator.manual_seed(7)
        found = []
        for _ in range(3):
            loss = loss_of(through(layers, x))
            torch.rand(5, generator=generator, device=lab.device)  # others draw, too
            before = generator.get_state()
            found += torch.autograd.grad(loss, leaves_of(layers, x))
            assert torch.equal(before, generator.get_state())
        return found

    assert assert_bits(run, layers, lab, policies, times=2)["tanh"] == "recompute"


DRAWS = [False]


@torch.library.custom_op("offload_tests::drawn_later", mutates_args=())
def drawn_later(x: torch.Tensor) -> torch.Tensor:
    """Draws random numbers if it is told to, as with a dropout that begins later, and does not say so."""
    return x + (torch.rand_like(x) if DRAWS[0] else 1)


drawn_later.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("offload_tests::flash", mutates_args=())
def flash(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout as flash-attn's: the state of the generator is a result, from which backward draws the same again."""
    state = torch.get_rng_state() if x.device.type == "cpu" else torch.cuda.get_rng_state()
    return x * torch.empty_like(x).bernoulli_(), state


def _flash_backward(ctx: Any, gradient: torch.Tensor, _: object) -> torch.Tensor:
    x, state = ctx.saved_tensors
    drawn = torch.empty_like(x).bernoulli_(generator=torch.Generator(x.device).set_state(state))
    return gradient * drawn


flash.register_autograd(
    _flash_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1])
)


@torch.library.custom_op("offload_tests::flash_attention", mutates_args=())
def flash_attention(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of flash-attn that PyTorch comes with, as flash-attn and xFormers offer it: without the tag."""
    how = {"dropout_p": 0.5, "is_causal": False, "return_debug_mask": False}
    found = torch.ops.aten._flash_attention_forward(x, x, x, None, None, *[x.shape[1]] * 2, **how)
    return found[:3]


def _flash_attention_backward(ctx: Any, gradient: torch.Tensor, *_: object) -> torch.Tensor:
    x, *results, state = ctx.saved_tensors
    how = (None, None, *[x.shape[1]] * 2, 0.5, False, state, torch.empty(0, device=x.device))
    return sum(torch.ops.aten._flash_attention_backward(gradient, x, x, x, *results, *how))


flash_attention.register_autograd(
    _flash_attention_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def attended(x: torch.Tensor) -> torch.Tensor:
    """One head of 16 for every 16 features; in bfloat16, as the kernel needs."""
    heads = x.to(torch.bfloat16).view(len(x), -1, WIDTH // 16, 16)
    return flash_attention(heads)[0].to(x.dtype).view(x.shape)


def picked(x: torch.Tensor) -> torch.Tensor:
    """What the numbers are drawn from is not saved, and must not be whatever memory holds: NaN is an error."""
    return x.gather(-1, x.detach().softmax(-1).flatten(0, -2).multinomial(WIDTH, replacement=True).view(x.shape))


DRAWN: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "dropout": (lambda x: x * torch.empty_like(x).bernoulli_(), ("bernoulli_", "mul #2")),
    "untagged": (drawn_later, ("*drawn_later",)),
    "untagged, recomputed": (lambda x: drawn_later(drawn_later(x)), ()),
    "as flash-attn": (lambda x: flash(x)[0], ("*flash",)),
    "as flash-attn, recomputed": (lambda x: flash(flash(x)[0])[0], ()),
    "picked": (picked, ("multinomial", "gather")),
}


@pytest.mark.parametrize(("draw", "kept"), DRAWN.values(), ids=list(DRAWN))
def test_what_draws_and_is_kept_runs_again_before_what_draws(
    draw: Callable[..., torch.Tensor], kept: tuple[str, ...], lab: Lab
) -> None:
    """Its result is kept, and nothing else asks for it; but the numbers drawn after it are others without it."""
    assert_draws_again(draw, kept, lab)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [("*flash_attention",), ()], ids=["kept", "recomputed"])
def test_flash_attention_that_does_not_say_that_it_draws(kept: tuple[str, ...], lab: Lab) -> None:
    if lab.device.type == "cpu":
        pytest.skip("the kernel is CUDA's")
    assert_draws_again(lambda x: attended(attended(x)), kept, lab)


def assert_draws_again(draw: Callable[..., torch.Tensor], kept: tuple[str, ...], lab: Lab) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = draw(x * 2).sin()
        second = F.dropout(x + 1, 0.5).tanh()
        return first - second

    layers, x = functions(function, lab)
    policies = {**dict.fromkeys(kept, "keep"), "*": "recompute"}
    with offloaded(layers, lab, policies) as handle:
        for DRAWS[0] in (False, False, True, True):
            assert_same(step(functions(function, lab)[0], x), step(layers, x))
        assert handle.regions(0)["tanh"] == "recompute"


@pytest.mark.parametrize("draws_at_first", [False, True])
def test_what_draws_and_is_kept_runs_again_before_what_may_draw(draws_at_first: bool, lab: Lab) -> None:
    """Nothing says that the operation behind it draws, which it may begin to do later."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = x * torch.empty_like(x).bernoulli_()
        return first.sin() - drawn_later(x + 1).tanh()

    layers, x = functions(function, lab)
    with offloaded(layers, lab, {"bernoulli_": "keep", "mul": "keep", "*": "recompute"}) as handle:
        for DRAWS[0] in (draws_at_first, draws_at_first, True, True):
            assert_same(step(functions(function, lab)[0], x), step(layers, x))
        assert handle.regions(0)["tanh"] == "recompute"


_COUNT = [0]


@torch.library.custom_op("offload_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Gives other bits each time, as kernels do that add in any order."""
    _COUNT[0] += 1
    return x * (1 + _COUNT[0] / 1024)


counted.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize("room", [True, False])
def test_what_differs_is_kept_and_what_is_behind_it_is_recomputed(
    room: bool, lab: Lab, caplog: pytest.LogCaptureFixture, unplanned: set[str], request: pytest.FixtureRequest
) -> None:
    if not room:
        request.getfixturevalue("no_room")
    unplanned.add("comes out with other bits")
    layers, x = functions(lambda x, w: counted(x * 2).sin().tanh().exp() - (x + 1).sin(), lab)

    def run(start: int) -> list[torch.Tensor]:
        """A step of one layer whose forward is the operation's ``start``-th call."""
        _COUNT[0] = start
        y = layers[0](x)
        return gradients(leaves_of(layers[:1], x), lambda: loss_of(y).backward())

    expected = [run(start) for start in range(0, 50, 10)]
    with offloaded(layers, lab) as handle:
        for start in range(0, 50, 10):
            assert_same(expected[start // 10], run(start))
        regions = handle.regions(0)
        assert regions["offload_tests::counted"] == "offload"
        assert {policy for name, policy in regions.items() if "counted" not in name} == {"recompute"}
        y = layers[0](x)
        with Seen() as seen:
            loss_of(y).backward()
    assert (seen.times["tanh"], seen.times["exp"]) == (1, 1)
    assert not seen.times["offload_tests::counted"]
    assert len([line for line in caplog.messages if "comes out with other bits" in line]) == 1


def test_all_that_differs_is_kept_where_the_device_has_no_memory_to_find_its_origin(
    lab: Lab, unplanned: set[str]
) -> None:
    unplanned.add("comes out with other bits")

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if _is_called_by("_origins"):
            raise torch.OutOfMemoryError("no memory is left for a second run")
        return counted(x * 2).sin().tanh() - (x + 1).sin()

    layers, x = functions(function, lab)
    found = []
    for handle in (None, offloaded(layers, lab)):
        with handle or contextlib.nullcontext():
            for _COUNT[0] in (0, 0):
                y = layers[0](x)
                found.append(gradients(leaves_of(layers[:1], x), loss_of(y).backward))
            regions = {} if handle is None else handle.regions(0)
    assert_same(found[0] + found[1], found[2] + found[3])
    assert (regions["tanh"], regions["add"]) == ("offload", "recompute")


def test_what_differs_in_a_forward_that_takes_another_way_raises(lab: Lab, unplanned: set[str]) -> None:
    """All operations run again then, and nothing behind the one that differs would come out as it was."""
    unplanned.add("comes out with other bits")
    way = Way()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = counted(x * 2).sin().tanh().exp() + 1
        return (y.sin() if way.now else y.cos().mul(2)).sin() * w.mean()

    layers, x = functions(function, lab)

    def run() -> list[torch.Tensor]:
        _COUNT[0] = 0
        y = layers[0](x)
        return gradients(leaves_of(layers[:1], x), lambda: loss_of(y).backward())

    expected = []
    for _ in range(2):
        way.turn()
        expected.append(run())
    with offloaded(layers, lab):
        for _ in range(2):
            assert_same(expected[1], run())
        way.turn()
        with pytest.raises(RuntimeError, match="it computes other values as saved tensor 0 than in forward"):
            run()
        assert_same(expected[0], run())


def test_what_is_behind_what_differs_is_kept_where_handing_over_gives_other_bits(lab: Lab, unplanned: set[str]) -> None:
    """Then nothing is handed over, and all that is behind it would come out as the second run computes it."""
    unplanned |= {"comes out with other bits", "handing over gave other bits"}
    way = Way()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        handed = any(isinstance(mode, HandOver) for mode in _get_current_dispatch_mode_stack())
        return counted(x * 2).sin().tanh() * (x * (1 + (handed and way.now) * 2**-10)).cos() * w.mean()

    layers, x = functions(function, lab)

    def run() -> list[torch.Tensor]:
        _COUNT[0] = 0
        return gradients(leaves_of(layers[:1], x), lambda: loss_of(layers[0](x)).backward())

    expected = run()
    with offloaded(layers, lab) as handle:
        for way.now in (0, 1, 1):
            assert_same(expected, run())
        assert [handle.regions(0)[name] for name in ("tanh", "cos")] == ["offload", "recompute"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says so although they are asked for
def test_what_changes_the_values_of_a_sparse_tensor_runs_again(lab: Lab) -> None:
    """A sparse tensor does not tell whose memory its values are: what runs before it is read may have changed it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        values = x.detach().flatten() * 2
        places = torch.arange(x.numel(), device=x.device)[None]
        sparse = torch.sparse_coo_tensor(places, values, [x.numel()], check_invariants=True)
        values.add_(1)
        return (sparse.to_dense().view_as(x) * x).sin() * w.mean()

    assert assert_right(function, lab)["mul"] == "recompute"


def test_what_differs_by_itself_behind_what_differs(lab: Lab, unplanned: set[str]) -> None:
    """The second operation must run again, as its result is not saved: nothing behind the first one is recomputed."""
    unplanned.add("comes out with other bits")
    layers, x = functions(lambda x, w: counted(counted(x * 2).sin()).tanh().exp() - (x + 1).sin(), lab)

    def run() -> list[torch.Tensor]:
        _COUNT[0] = 0
        return gradients(leaves_of(layers[:1], x), lambda: loss_of(layers[0](x)).backward())

    expected = run()
    with offloaded(layers, lab) as handle:
        for _ in range(3):
            assert_same(expected, run())
        assert [handle.regions(0)[name] for name in ("tanh", "exp", "mul")] == ["offload", "offload", "recompute"]


BITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "not a number": lambda x: x.log().nan_to_num(),
    "conjugated": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))).exp().conj() ** 2),
    "negated": lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))).exp().conj().imag.sin(),
}


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("function", BITS.values(), ids=list(BITS))
def test_bits_are_compared(
    function: Callable[[torch.Tensor], torch.Tensor], short: bool, lab: Lab, request: pytest.FixtureRequest
) -> None:
    """NaN is not equal to itself, and conjugated and negated tensors are marked so, without being computed.

    Also where they are on the host meanwhile.
    """
    if short:
        request.getfixturevalue("no_room")
    layers, x = functions(lambda x, w: function(x * w.mean()).mean() * x, lab)
    assert assert_bits(partial(step, layers, x), layers, lab)["mul"] == "recompute"


RUNS = [0]
"""How often a layer's forward has run."""


class Keeps(nn.Module):
    """Does one of several things that must not be done twice; each gives a factor."""

    def __init__(self, what: Callable[..., Any], device: torch.device) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.fixed = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("large", torch.zeros(600, 600))
        self.listed = [torch.zeros(600, 600, device=device), torch.zeros(3, device=device)]
        self.seen, self.queue, self.numbers, self.counts = [1.0], collections.deque([1.0]), {1}, {"calls": 1}
        self.boxes = [types.SimpleNamespace(calls=1)]
        self.last = self.weight.to(device) * 1

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor], *, counter: Any) -> torch.Tensor:
        RUNS[0] += 1
        y = (x + self.weight).sin()
        return (y * self.what(self, x, y, cache, counter) + 1).tanh() + x


def _own_gradients(layer: Any, x: torch.Tensor, y: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.autograd.grad(y.tanh().sum(), x, create_graph=True)[0]


def _replaced(layer: Any, x: torch.Tensor, y: torch.Tensor, *_: object) -> torch.Tensor:
    factor = layer.last.detach().mean() + 1
    layer.last = y * 2
    return factor


def _in_its_place(boxes: list[Any]) -> int:
    """The new object often has the address of the old one."""
    calls: int = boxes.pop().calls + 1
    boxes.append(types.SimpleNamespace(calls=calls))
    return calls


def _grown(many: Any) -> int:
    (many.add if isinstance(many, set) else many.append)(len(many) + 1.0)
    return len(many)


ONCE: dict[str, tuple[Callable[..., Any], str]] = {
    "a cache": (lambda layer, x, y, cache, counter: _grown(cache), "forward changes what an argument holds"),
    "an object": (
        lambda layer, x, y, cache, counter: [setattr(counter, "calls", counter.calls + 1), counter.calls][1],
        "forward changes what an argument holds",
    ),
    "a list": (lambda layer, *_: _grown(layer.seen), "forward changes what an attribute holds"),
    "another object in a list": (lambda layer, *_: _in_its_place(layer.boxes), "changes what an attribute holds"),
    "a queue": (lambda layer, *_: _grown(layer.queue), "forward changes what an attribute holds"),
    "a set": (lambda layer, *_: _grown(layer.numbers), "forward changes what an attribute holds"),
    "a dictionary": (
        lambda layer, *_: [layer.counts.update(calls=layer.counts["calls"] + 1), layer.counts["calls"]][1],
        "forward changes what an attribute holds",
    ),
    "its own gradients": (_own_gradients, "forward computes gradients of its own"),
    "an input": (lambda layer, x, *_: x.detach().mul_(2).mean(), "forward writes into an input"),
    "a parameter": (lambda layer, *_: layer.fixed.add_(1).clone(), "forward writes into fixed"),
    "a large buffer": (lambda layer, *_: layer.large.add_(1).mean(), "forward writes into large"),
    "a large tensor in a list": (lambda layer, *_: layer.listed[0].add_(1).mean(), "writes into a large tensor"),
    "a small tensor in a list": (lambda layer, *_: layer.listed[1].add_(1).mean(), "writes into a tensor in listed"),
    "a tensor with a graph": (_replaced, "forward reads and replaces last"),
}


@pytest.mark.parametrize(("what", "words"), ONCE.values(), ids=list(ONCE))
@pytest.mark.usefixtures("nothing_recomputed")
def test_a_layer_that_cannot_be_run_again(
    what: Callable[..., Any], words: str, lab: Lab, caplog: pytest.LogCaptureFixture, unplanned: set[str]
) -> None:
    unplanned.add("is never recomputed")

    def run(layers: nn.ModuleList, rows: int) -> list[torch.Tensor]:
        def forward_and_backward() -> None:
            cache: list[float] = []
            y = x[:rows] * 1
            for layer in layers:
                y = layer(y * 1, cache, counter=counter)
            loss_of(y).backward()

        counter = types.SimpleNamespace(calls=0)
        return gradients(leaves_of(layers, x), forward_and_backward)

    (plain, x), (layers, _) = (build(partial(Keeps, what, lab.device), LAYERS, lab.device) for _ in range(2))
    with offloaded(layers, lab) as handle:
        for rows, is_learned in ((2, False), (2, True), (2, True), (1, False), (1, True)):
            wanted = run(plain, rows)
            RUNS[0] = 0
            assert_same(wanted, run(layers, rows))
            assert not is_learned or RUNS[0] == LAYERS
            assert handle.regions(0)["add"] == "offload"
    for name in ("seen", "boxes", "queue", "numbers", "counts"):
        assert [getattr(layer, name) for layer in layers] == [getattr(layer, name) for layer in plain]
    said = [line for line in caplog.messages if "layer 1 (Keeps) is never recomputed" in line]
    assert len(said) == 1
    assert words in said[0]


def handles_errors(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    try:
        return (x @ w).sin().exp().tanh()
    except Exception:  # noqa: BLE001  # as code does that tries a faster function first
        return (x + w.mean()).cos().exp().sin().cos().tanh()


def renames_errors(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    try:
        return (x @ w).sin().exp() + 1
    except Exception as error:
        raise ValueError("x must be fine") from error


@pytest.mark.parametrize("function", [handles_errors, renames_errors])
def test_the_end_of_a_second_run_is_no_error_of_the_layer(function: Callable[..., torch.Tensor], lab: Lab) -> None:
    assert "recompute" in assert_right(function, lab).values()


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_part_of_a_layer_in_torchscript(lab: Lab) -> None:
    def make() -> nn.Module:
        part = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)))
        return Composed(lambda own, x: own.part(x), part=part)

    layers, x = build(make, LAYERS, lab.device)
    assert "recompute" in assert_bits(partial(step, layers, x), layers, lab, times=5).values()


class Pair(NamedTuple):
    """Two arguments by name."""

    one: torch.Tensor
    two: torch.Tensor


class Summed(Pair):
    """Looks into its tensors when it is made, as ``PackedSequence`` does."""

    def __new__(cls, one: torch.Tensor, two: torch.Tensor) -> "Summed":
        return super().__new__(cls, one, one + two)


class Moded(nn.Module):
    """Saves other tensors in evaluation, and for inputs of another kind; counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, more: Any = 1) -> torch.Tensor:
        RUNS[0] += 1
        y = x.sin() * self.weight + self.bias.exp()
        if not self.training:
            y = (y * y).sin()
        if isinstance(more, Pair):
            y = (y * more.one).sin() + more.two
        elif isinstance(more, dict):
            y = (y * more["x"]).sin() if "x" in more else y.cos()
        elif isinstance(more, (list, tuple)):
            for one in more:
                y = (y * one).sin() if one is not x else y.cos()
        else:
            for _ in range(more):
                y = y.sin()
        return y.tanh()


def _in_autocast(layer: nn.Module, x: torch.Tensor, enabled: bool) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
        return layer(x)


KINDS: dict[str, Callable[[Any, torch.Tensor, bool], torch.Tensor]] = {
    "shape": lambda layer, x, other: layer(x[:1] if other else x),
    "requires_grad": lambda layer, x, other: layer(x.detach() if other else x),
    "dtype": lambda layer, x, other: layer(x.double() if other else x),
    "layout": lambda layer, x, other: layer(x.mT.contiguous().mT if other else x),
    "training": lambda layer, x, other: [layer.train(not other), layer(x)][1],
    "frozen": lambda layer, x, other: [layer.bias.requires_grad_(not other), layer(x)][1],
    "number": lambda layer, x, other: layer(x, 2 if other else 1),
    "tuple": lambda layer, x, other: layer(x, (x + 1, 2.0) if other else (x + 1,)),
    "list": lambda layer, x, other: layer(x, [x + 1, 2.0] if other else [x + 1]),
    "same tensor": lambda layer, x, other: layer(x, [x, x] if other else [x]),
    "names": lambda layer, x, other: layer(x, more={"z" if other else "x": x + 1}),
    "fields": lambda layer, x, other: layer(x, Pair(x + 1, x) if other else 1),
    "fields that are computed": lambda layer, x, other: layer(x, Summed(x + 1, x) if other else 1),
    "autocast": _in_autocast,
    "autocast's context": lambda layer, x, other: _in_autocast(layer, x, False) if other else layer(x),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_each_kind_of_input_is_learned_once(kind: Callable[..., torch.Tensor], lab: Lab) -> None:
    layers, x = build(Moded, 1, lab.device)
    (layer,) = layers

    def run(other: bool) -> list[torch.Tensor | None]:
        for leaf in (x, layer.weight, layer.bias):
            leaf.grad = None
        RUNS[0] = 0
        loss_of(kind(layer, x, other)).backward()
        return [leaf.grad for leaf in (x, layer.weight, layer.bias)]

    expected = {other: run(other) for other in (False, True)}
    with offloaded(layers, lab):
        for time, other in enumerate([False, True] * 4):
            for wanted, found in zip(expected[other], run(other), strict=True):
                assert (wanted is None) == (found is None)
                assert wanted is None or torch.equal(wanted, found)
            assert RUNS[0] == 2 if time > 3 else RUNS[0] >= 2 + (time < 2)


@pytest.mark.usefixtures("nothing_recomputed")
def test_a_layer_that_keeps_everything_has_no_hooks_once_it_is_learned(lab: Lab) -> None:
    hooked = list[bool]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hooked.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        return (x @ w).tanh()

    layers, x = functions(function, lab)
    expected = step(layers, x)
    hooked.clear()
    with offloaded(layers, lab, {"*": "keep"}):
        for _ in range(2):
            assert_same(expected, step(layers, x))
    assert hooked == [True] * LAYERS + [False] * LAYERS


# What is handed over is looked into as it lay in memory when it was learned.


def _other_strides(layers: nn.ModuleList, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    other = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    return x.detach().requires_grad_(), other.requires_grad_()


def _other_weights(layers: nn.ModuleList, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for layer in layers:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    return (x.detach().requires_grad_(),)


@pytest.mark.parametrize("change", [_other_strides, _other_weights], ids=["of the input", "of the weights"])
def test_other_strides_than_learned(change: Callable[..., tuple[torch.Tensor, ...]], lab: Lab) -> None:
    layers, x = functions(lambda x, w: ((x + 1).sin().exp() * w.sin().cos().exp().mean()).cos(), lab)
    expected = step(layers, x)
    with offloaded(layers, lab, {"sin*": "keep", "*": "recompute"}):
        for _ in range(2):
            assert_same(expected, step(layers, x))
        for one in change(layers, x) * 3:
            assert_same(expected, step(layers, one))


def test_a_layer_that_goes_another_way_each_time_is_recomputed_as_a_whole(lab: Lab) -> None:
    runs, way = [0], [0]

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        y = x * w.mean()
        for _ in range(way[0] % 4):
            y = (y + 1).sin()
        return y.tanh()

    layers, x = build(lambda: Function(function), 1, lab.device)
    expected = {}
    for way[0] in range(4):
        expected[way[0]] = step(layers, x)
    with offloaded(layers, lab):
        for way[0] in [*range(4)] * 3:
            runs[0] = 0
            assert_same(expected[way[0]], step(layers, x))
        for way[0] in range(4):
            runs[0] = 0
            y = layers[0](x)
            assert runs[0] == 1
            assert_same(expected[way[0]], gradients(leaves_of(layers, x), loss_of(y).backward))
            assert runs[0] == 2


def test_a_layer_that_goes_another_way_for_good_is_learned_again(lab: Lab) -> None:
    times = [1]

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w.mean()
        for _ in range(times[0]):
            y = (y + 1).sin()
        return y.tanh()

    layers, x = functions(function, lab)
    with offloaded(layers, lab):
        for times[0] in (1, 1, 3, 3, 3):
            plain, _ = functions(function, lab)
            assert_same(step(plain, x), step(layers, x))
        y = layers[0](x)
        with Seen() as seen:
            loss_of(y).backward()
        assert (seen.times["sin"], seen.times["add"]) == (3, 3)  # the last one for the result of tanh


def test_what_is_prepared_in_the_first_forward(lab: Lab) -> None:
    """The forward that prepares it is not learned; the product before it is handed over from then on."""
    table: list[torch.Tensor] = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        RUNS[0] += 1
        y = x @ w
        if not table:
            table.append(torch.linspace(-1, 1, WIDTH, device=x.device) * 2)
        return F.dropout(y + table[0]).sin() * x

    layers, x = build(lambda: Function(function), 1, lab.device)
    expected = step(layers, x)
    table.clear()
    with offloaded(layers, lab, {"mm": "keep", "*": "recompute"}) as handle:
        for _ in range(4):
            RUNS[0] = 0
            with Seen() as seen:
                assert_same(expected, step(layers, x))
        assert (RUNS[0], seen.times["mm"]) == (2, 3)
        assert "recompute" in handle.regions(0).values()


@pytest.mark.parametrize("policies", [ALL, {"mm": "keep", "*": "recompute"}], ids=["all", "products kept"])
def test_experts(policies: dict[str, str], lab: Lab) -> None:
    """Before the first operation whose sizes depend on data, regions are kept; the rest is run as a whole."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        RUNS[0] += 1
        tokens = (x.flatten(0, -2) @ w).tanh()
        found = torch.zeros_like(tokens)
        for expert, chosen in enumerate((tokens[:, 0] > 0, tokens[:, 0] <= 0)):
            (rows,) = chosen.nonzero(as_tuple=True)
            for _ in range(expert + int(rows.numel() > 7)):
                found = found.index_add(0, rows, (tokens[rows] * 2).sin())
        return (found + tokens).cos().view_as(x) * x

    layers, x = build(lambda: Function(function), 1, lab.device)
    inputs = [(x.detach() + shift).requires_grad_() for shift in (0, 0.1, -0.1, 1, -1, 0.05)]
    expected = [step(layers, given) for given in inputs]
    with offloaded(layers, lab, policies) as handle:
        for time, (given, wanted) in enumerate(zip(inputs, expected, strict=True)):
            RUNS[0] = 0
            with Seen() as seen:
                assert_same(wanted, step(layers, given))
            if time > 1:
                assert RUNS[0] == 2
                assert seen.times["mm"] == 3 + (policies is ALL)  # one of them in forward, two for gradients
        assert handle.regions(0)["cos"] == "recompute"


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert torch.equal(ctx.saved_tensors[0], ctx.saved_tensors[0])
        return gradient * ctx.saved_tensors[0].cos()


def test_a_saved_tensor_that_is_read_again(lab: Lab) -> None:
    """By the same backward, and before it by a program that looks at the graph."""
    layers, x = functions(lambda x, w: ReadsTwice.apply((x + w.mean()).tanh() * 2), lab)
    expected = step(layers, x)
    with offloaded(layers, lab) as handle:
        for time in range(4):
            y = layers[0](x)
            if time % 2:
                assert torch.equal(y.grad_fn.saved_tensors[0].sin(), y)
            loss = loss_of(layers[2](layers[1](y)))
            assert_same(expected, gradients(leaves_of(layers, x), loss.backward))
        assert handle.regions(0)["tanh"] == "recompute"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_second_run(error: type[BaseException], lab: Lab) -> None:
    raises = [False]

    class Raising(Switched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if raises[0]:
                raise error("in the second run")
            return y.tanh()

    layers, x = build(partial(Raising, lab.device), LAYERS, lab.device)
    expected = step(layers, x)
    with offloaded(layers, lab, MUL):
        for _ in range(2):
            assert_same(expected, step(layers, x))
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            y = through(layers, x)
        loss = loss_of(y)
        layers.eval()
        torch.manual_seed(5)
        settings, state = _settings(), torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        raises[0] = True
        try:
            with pytest.raises(error, match="in the second run"):
                loss.backward()
            assert torch.get_default_dtype() is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        raises[0] = False
        assert _settings() == settings
        assert torch.equal(state, torch.get_rng_state())
        assert not any(layer.training or layer.dropout.training for layer in layers)
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        layers.train()
        for _ in range(2):
            assert_same(expected, step(layers, x))


@pytest.mark.parametrize("retain", [False, True])
def test_the_frame_lets_go_after_the_second_run(retain: bool, lab: Lab) -> None:
    """Although the graph is still held, and so its nodes are."""
    layers, x = functions(lambda x, w: ((x + 1).sin() * 2).tanh() - x, lab)
    with offloaded(layers, lab, ADD):
        step(layers, x)
        inputs = []
        y = x
        for layer in layers:
            z = y * 1
            inputs.append(StorageWeakRef(z.untyped_storage()))
            y = layer(z)
            del z
        loss = loss_of(y)
        assert not any(one.expired() for one in inputs)
        loss.backward(retain_graph=retain)
        assert [one.expired() for one in inputs] == [not retain] * LAYERS
        if retain:
            loss.backward()
            assert [one.expired() for one in inputs] == [True] * LAYERS


def test_what_is_recomputed_is_freed_as_backward_goes(lab: Lab) -> None:
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x.sin()
            made.append(StorageWeakRef(x.untyped_storage()))
            x.register_hook(lambda _: alive.append(sum(not one.expired() for one in made)))
        return x * 2

    layers, x = functions(function, lab)
    with offloaded(layers, lab):
        for _ in range(3):
            loss = loss_of(layers[0](x * 1))
            made.clear()
            alive.clear()
            loss.backward()
        assert alive == [0, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.usefixtures("nothing_recomputed")
def test_what_is_dropped_is_freed(lab: Lab) -> None:
    side, one = 256, 256 * 256 * 4

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = x + 1
        x = kept
        for _ in range(8):
            x = x.sin() * 2
        return kept.sin() * x

    layers, _ = functions(function, lab)
    x = torch.rand(side, side, device=lab.device, requires_grad=True)

    def held_bytes() -> int:
        with offload.memory_meter(lab.device) as meter:
            y = through(layers, x)
        del y
        return meter.peak_bytes

    assert held_bytes() > LAYERS * 10 * one
    with offloaded(layers, lab, ADD):
        held_bytes()  # learns
        held_bytes()  # compares what is handed over
        assert LAYERS * one < held_bytes() < (2 * LAYERS + 4) * one


@pytest.mark.usefixtures("nothing_recomputed")
def test_an_abandoned_graph_is_freed_by_reference_counts(lab: Lab) -> None:
    made: list[StorageWeakRef] = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = (y.sin() * 2).tanh()
        out = z - x
        made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (y, z, out))
        return out

    layers, x = functions(function, lab)
    given = x * 1
    gc.collect()
    gc.disable()
    try:
        with offloaded(layers, lab, {**dict.fromkeys(("add", "tanh"), "keep"), "*": "recompute"}):
            for time in range(4):
                made.clear()
                y = through(layers, given)
                if time == 2:  # one that may go through backward again
                    loss_of(y).backward(retain_graph=True)
                del y
                assert [one.expired() for one in made] == [True] * len(made)
    finally:
        gc.enable()


class Doubled(torch.autograd.Function):
    """Lives as long as its graph."""

    made: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Doubled.made.append(weakref.ref(ctx))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize(
    ("where", "steps"),  # steps before: a layer fails while it learns, proves, or follows
    [*(("forward", steps) for steps in range(4)), ("second run", 1), ("second run", 2), ("what it saves", 2)],
)
def test_the_graph_of_a_layer_that_fails_is_freed_by_reference_counts(where: str, steps: int, lab: Lab) -> None:
    """Also of the layers before the one that has failed, which may have run out of memory."""
    fails = [False]

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (Doubled.apply(x) @ w).sin() * 2
        if fails[0] and len(Doubled.made) == LAYERS + (where != "forward"):
            if where == "what it saves":
                return y - x
            raise torch.OutOfMemoryError("none is left")
        return y.sin() - x

    layers, x = functions(function, lab)
    gc.collect()
    gc.disable()
    try:
        with offload.offload_layers(layers, 1, policies={"*": "recompute"}, min_bytes=0, device=lab.device):
            for _ in range(steps):
                loss_of(through(layers, x * 1)).backward()
            Doubled.made.clear()
            fails[0] = True
            with pytest.raises(RuntimeError, match="saves fewer" if where == "what it saves" else "none is left"):
                loss_of(through(layers, x * 1)).backward()
            end = time.monotonic() + 10  # a GPU's backward is freed in a thread of its own
            while any(one() for one in Doubled.made) and time.monotonic() < end:
                time.sleep(0.01)
            assert [one() for one in Doubled.made] == [None] * len(Doubled.made)
            fails[0] = False
            for _ in range(2):
                loss_of(through(layers, x * 1)).backward()
    finally:
        gc.enable()


FACTOR = [0.0]


def _fill(y: torch.Tensor, z: torch.Tensor, start: int = 0) -> torch.Tensor:
    """By NumPy or a Triton kernel; zeros at first, as adapters are: whatever ``z`` holds, the bits are the same."""
    if y.device.type == "cpu":
        y.numpy()[..., start:] = z.numpy()[..., start:] * FACTOR[0] if FACTOR[0] else 0
    else:
        import triton_kernels  # Triton comes with PyTorch for GPUs alone

        triton_kernels.scale(y[..., start:], z[..., start:], FACTOR[0])
    return y


def _made(z: torch.Tensor) -> torch.Tensor:
    if z.device.type == "cpu":
        return torch.from_numpy(z.numpy() * FACTOR[0])
    return _fill(torch.empty(z.shape, device=z.device), z)


def _beside(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y[..., : WIDTH // 2].copy_(x[..., : WIDTH // 2])
    return _fill(y, z, WIDTH // 2)


UNSEEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "new memory": lambda x, z: _fill(torch.empty_like(x), z),
    "beside an operation": _beside,
    "changed in place": lambda x, z: _fill(torch.empty_like(x), z).mul_(1),
    "added in place": lambda x, z: (x * 0.1).add_(_fill(torch.empty_like(x), z)),
    "copied": lambda x, z: torch.empty_like(x).copy_(_fill(torch.empty_like(x), z)),
    "made": lambda x, z: _made(z).nan_to_num_().add_(x),
    "out": lambda x, z: torch.sin(_fill(torch.empty_like(x), z), out=torch.empty_like(x)),
}


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, z: torch.Tensor, how: Callable[..., torch.Tensor]) -> torch.Tensor:
        return how(x, z)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, gradient * FACTOR[0], None


@pytest.mark.filterwarnings("ignore:policies has patterns that match no region")
@pytest.mark.parametrize("how", UNSEEN.values(), ids=list(UNSEEN))
def test_a_kernel_that_writes_unseen(how: Callable[..., torch.Tensor], lab: Lab) -> None:
    """What it reads must be computed again, although the comparison in the first step cannot tell."""
    layers, x = functions(lambda x, w: _Kernel.apply(x + 1, x * 3, how).sin().tanh() - x.sin(), lab)
    expected = {}
    for FACTOR[0] in (0, 2):
        expected[FACTOR[0]] = step(layers, x)
    lab.adverse()
    for policies in (ALL, ADD, {"copy_": "keep", "empty_like": "keep", "*": "recompute"}):
        with offloaded(layers, lab, policies) as handle:
            for FACTOR[0] in (0, 2, 2):
                assert_same(expected[FACTOR[0]], step(layers, x))
            assert handle.regions(0)["tanh"] == "recompute"


def test_a_kept_result_that_forward_overwrites_before_it_is_saved(lab: Lab) -> None:
    regions = assert_right(lambda x, w: (y := x + 1).sigmoid() * y.mul_(3).sin() * w.mean(), lab, ADD)
    assert (regions["add"], regions["sigmoid"]) == ("keep", "recompute")


def test_a_kept_result_that_forward_overwrites_after_it_is_saved(lab: Lab, unplanned: set[str]) -> None:
    """Autograd refuses to read it, and the loss does not ask for that: it is recomputed."""
    unplanned.add("comes out with other bits")

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        kept = x + 1
        unused = kept.sin()
        kept.add_(1)
        return [unused, (kept * 2).tanh() * w.mean()]

    layers, x = functions(function, lab)
    leaves = [x, layers[0].weight]
    assert_bits(lambda: gradients(leaves, lambda: loss_of(layers[0](x)[1]).backward()), layers, lab, ADD)


def test_a_small_result_that_forward_overwrites_after_it_is_saved(lab: Lab, unplanned: set[str]) -> None:
    """It is kept although all else is recomputed: the second run ends before it overwrites anything."""
    unplanned.add("comes out with other bits")

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        small = x.mean() + 1
        y = (x * small.sin()).tanh() * w.mean()
        small.data.mul_(3)
        return y

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, min_bytes=64):
        for _ in range(3):
            assert_same(expected, step(layers, x))


def test_handing_over_that_makes_other_operations_is_not_proven(lab: Lab, unplanned: set[str]) -> None:
    calls = [0]

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        kept = x + 1
        if any(isinstance(mode, HandOver) for mode in _get_current_dispatch_mode_stack()):
            kept = kept * 1
        return kept.sin().tanh() * w.mean()

    unplanned.add("handing over gave other bits")
    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, ADD):
        for _ in range(3):
            calls[0] = 0
            assert_same(expected, step(layers, x))
    assert calls[0] == 2 * LAYERS


@pytest.mark.filterwarnings("ignore:.*freed no device memory:UserWarning")
@pytest.mark.parametrize("policy", ["keep", "offload"])
def test_a_kept_result_that_is_overwritten_before_backward(policy: str, lab: Lab) -> None:
    """Recomputation would read what was handed over: it raises, as autograd does for what it has saved."""
    outputs: list[torch.Tensor] = []
    way = Way()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if way.now:  # not while the layer is learned, which is refused if it leaves tensors elsewhere
            outputs.append(y)
        return (y.sin() * 2).tanh()

    layers, x = functions(function, lab)
    with offloaded(layers, lab, {"add": policy, "*": "recompute"}, int(policy == "offload")):
        for _ in range(2):
            step(layers, x)
        way.turn()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(layers, x, lambda: outputs[-1].detach().add_(1))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_parameter_that_changes_before_backward(replaced: bool, lab: Lab) -> None:
    """A bias, which autograd has not saved; also one in place of that with which the layer was learned."""
    layers, x = build("mlp", LAYERS, lab.device)
    with offloaded(layers, lab):
        for _ in range(2):
            step(layers, x)
        if replaced:
            layers[1].up.bias = nn.Parameter(layers[1].up.bias.detach().clone())
            step(layers, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation: a parameter of shape"):
            step(layers, x, lambda: layers[1].up.bias.detach().add_(1))


@pytest.mark.parametrize("steps", [0, 2], ids=["in the first step", "later"])
def test_a_tensor_of_others_that_changes_before_backward(steps: int, lab: Lab) -> None:
    """Autograd has not saved it, and would not notice; a second run would read what it has become."""
    shift = torch.ones(WIDTH, device=lab.device)
    layers, x = functions(lambda x, w: ((x + shift).sin() * w.mean()).tanh(), lab)
    with offloaded(layers, lab):
        for _ in range(steps):
            step(layers, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor, which"):
            step(layers, x, lambda: shift.add_(1))


def test_a_number_that_is_another_in_each_step_is_said_to_cost_time(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """As the number of a step is. A tensor of it is an input of one kind."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
            RUNS[0] += 1
            return (x * number + 1).sin().exp()

    def steps(layers: nn.ModuleList, x: torch.Tensor, kind: Callable[[int], Any]) -> list[int]:
        runs = []
        for number in range(1, 13):
            RUNS[0], y = 0, x
            for layer in layers:
                y = layer(y, kind(number))
            loss_of(y).backward()
            runs.append(RUNS[0])
        return runs

    layers, x = build(Scaled, LAYERS, lab.device)
    for kind, times in ((partial(torch.tensor, device=lab.device), 0), (int, 1)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "offload"), offloaded(layers, lab):
            runs = steps(layers, x, kind)
        assert (runs[-1] == runs[0]) is bool(times)
        said = "Scaled was learned 8 times, in each of which its forward ran again: a number among its arguments"
        assert sum(said in line for line in caplog.messages) == times


def test_kinds_of_inputs_that_are_remembered(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are: else a kind that is new each time would fill the host's memory."""
    monkeypatch.setattr(layer_policies, "MOST_WAYS", 2)
    runs = list[int]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs.append(x.ndim)
        return (x + 1).sin() * w.mean()

    layers, x = functions(function, lab)
    kinds = [x, x[0].detach().requires_grad_(), x[0, 0].detach().requires_grad_()]
    learned = []
    with offloaded(layers, lab):
        for kind in (0, 1, 1, 0, 2, 2, 0, 0):
            runs.clear()
            step(layers, kinds[kind])
            learned.append(len(runs) > 2 * LAYERS)
    assert learned == [True, True, False, False, True, False, True, False]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("inner", [False, True], ids=["layer", "submodule"])
def test_a_hook_that_collects_results_is_called_once(inner: bool, late: bool, lab: Lab, unplanned: set[str]) -> None:
    """A second run's results lead to no graph, and a list would hold each twice."""
    unplanned.update({"is never recomputed"} if inner or not late else ())
    layers, x = build("decoder", LAYERS, lab.device)
    features: list[torch.Tensor] = []
    logged: list[torch.Tensor] = []
    hooked = layers[1].norm1 if inner else layers[1]

    def add_hook() -> None:
        hooked.register_forward_hook(lambda module, args, output: features.append(output))
        hooked.register_forward_hook(lambda module, args, output: logged.append(output.detach()))

    def run() -> None:
        features.clear()
        y = through(layers, x)
        (loss_of(y) + sum(loss_of(feature) for feature in features)).backward()

    add_hook()
    expected = gradients(leaves_of(layers, x), run)
    assert len(logged) == 1
    if late:
        hooked._forward_hooks.clear()
    with offloaded(layers, lab, ALL):
        if late:
            add_hook()
        for count in range(2, 5):
            assert_same(expected, gradients(leaves_of(layers, x), run))
            assert len(logged) == count
            assert torch.equal(logged[0], logged[-1])


def test_a_hook_may_hold_what_has_gone(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    gone = weakref.proxy(set())
    layers[1].norm1.register_forward_hook(lambda module, args, output: None if output is not None else gone)
    expected = gradients(leaves_of(layers, x), lambda: loss_of(through(layers, x)).backward())
    with offloaded(layers, lab, ALL):
        assert_same(expected, gradients(leaves_of(layers, x), lambda: loss_of(through(layers, x)).backward()))


@pytest.mark.usefixtures("nothing_recomputed")
def test_a_layer_that_collects_its_results_is_refused(lab: Lab) -> None:
    collected: list[torch.Tensor] = []
    layers, x = functions(lambda x, weight: collect(collected, (x @ weight).sin()).cos(), lab)
    with (
        offloaded(layers, lab, ALL),
        pytest.raises(RuntimeError, match="a hook, a list or a global variable keeps tensors that the layer computes"),
    ):
        step(layers, x)


def test_garbage_in_a_circle_keeps_no_tensors(lab: Lab) -> None:
    """It is no list of the program's, and is gone when Python collects it."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        circle: list[Any] = [(x @ weight).sin()]
        circle.append(circle)
        return circle[0].cos()

    assert assert_right(function, lab, ALL)["sin"] == "recompute"


def collect(into: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    into.append(tensor)
    return tensor


COLLECTED: ContextVar[list[torch.Tensor] | None] = ContextVar("collected", default=None)


def test_a_hook_that_collects_results_for_the_caller_alone(lab: Lab) -> None:
    """As Hugging Face's models do with ``output_hidden_states=True``: the second run sees no collector."""
    layers, x = build("decoder", LAYERS, lab.device)
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: (COLLECTED.get() or []).append(output))

    def run() -> None:
        found: list[torch.Tensor] = [x]
        token = COLLECTED.set(found)
        through(layers, x)
        COLLECTED.reset(token)
        assert len(found) == 1 + LAYERS
        sum(loss_of(one) for one in found).backward()

    assert_bits(partial(gradients, leaves_of(layers, x), run), layers, lab)


@pytest.fixture
def full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory for copies of what is kept."""

    def refuse(_: torch.UntypedStorage) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError("no memory is left for a copy")

    monkeypatch.setattr(torch.UntypedStorage, "clone", refuse)


@pytest.mark.usefixtures("full_device")
def test_what_is_kept_is_handed_over_where_the_device_has_no_memory_for_copies(lab: Lab) -> None:
    regions = assert_right(lambda x, w: (x + 1).sin() * w.mean(), lab, ADD)
    assert (regions["add"], regions["sin"]) == ("keep", "recompute")
    lab.drain()
    lab.pool.trim()
    assert lab.pool.used_bytes == 0, "what was lent for the copies has been given back"


@pytest.mark.usefixtures("full_device")
def test_second_runs_are_compared_in_backward_where_neither_device_nor_pool_has_memory_for_copies(lab: Lab) -> None:
    """Copies in ordinary memory would take seconds for each layer."""
    runs = list[bool]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs.append(any(isinstance(mode, HandOver) for mode in _get_current_dispatch_mode_stack()))
        return (x + 1).sin().cos() * w.mean()

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, ADD, max_host_bytes=4096):
        runs.clear()
        assert_same(expected, step(layers, x))
    assert runs == [False, False] * LAYERS + [True, False] * LAYERS


@pytest.mark.usefixtures("full_device")
def test_what_the_proof_changes_is_put_back_where_the_device_has_no_memory_for_copies(
    lab: Lab, unplanned: set[str]
) -> None:
    """The second run is given what was kept itself, and adds to it once more, unseen."""
    if lab.device.type != "cpu":
        pytest.skip("NumPy writes into the memory of the CPU")

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = x + 1
        kept.detach().numpy()[...] += 1
        return kept.sin() * w.mean()

    unplanned.add("handing over gave other bits")
    assert_right(function, lab, ADD)


@pytest.mark.parametrize("room", ["no_room", "little_room"])
def test_handing_over_that_gives_other_bits_is_seen_in_backward_where_memory_is_short(
    room: str, lab: Lab, unplanned: set[str], request: pytest.FixtureRequest
) -> None:
    """It gives the same bits in the microbatch that is learned, and others in the next one."""
    request.getfixturevalue(room)
    way, runs = Way(), list[torch.Size]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs.append(x.shape)
        kept = x + 1
        handed = any(isinstance(mode, HandOver) for mode in _get_current_dispatch_mode_stack())
        return kept.sin() * (x * (1 + (handed and way.now) * 2**-10)).cos() * w.mean()

    unplanned.add("handing over gave other bits")
    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, ADD, max_host_bytes=4096):
        assert_same(expected, step(layers, x))
        way.now = True
        for times in (4, 2):  # what gives other bits once is handed nothing from then on
            runs.clear()
            assert_same(expected, step(layers, x))
            assert len(runs) == times * len(layers)


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_device_without_memory_to_compare_second_runs_is_asked_again(
    fails: int, lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """All operations run until then, and for good after three times."""
    way, runs = Way(), list[bool]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs.append(any(isinstance(mode, HandOver) for mode in _get_current_dispatch_mode_stack()))
        if way.now and runs[-2:] == [True, False]:
            raise torch.OutOfMemoryError("no memory is left to compare")
        return (x + 1).sin().cos().sin().cos() * w.mean()

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, ADD, max_host_bytes=4096):
        assert_same(expected, step(layers, x))
        peak_bytes, times = list[int](), list[int]()
        for way.now in (*[1] * fails, 0, 0):
            before = len(runs)
            with offload.memory_meter(lab.device) as meter:
                assert_same(expected, step(layers, x))
            peak_bytes.append(meter.peak_bytes)
            times.append((len(runs) - before) // LAYERS)
    assert times == [4] * fails + ([3, 2] if fails < 3 else [2, 2])
    assert runs[-1] is (fails < 3)
    assert max(peak_bytes) == peak_bytes[-1]  # what failed was freed
    lines = [line.partition("no memory to compare that with handing over")[1:] for line in caplog.messages]
    ends = [end for found, end in lines if found]
    assert ends == [", and tries again"] * LAYERS + [""] * LAYERS * (fails == 3)


@pytest.mark.parametrize("where", ["prove_all", "prove_hand_over"])
def test_a_device_without_memory_for_a_second_run_in_forward_is_asked_again(where: str, lab: Lab) -> None:
    """In the next forward, or in backward: what was not compared is no reason to recompute nothing, or everything."""
    way, runs = Way(), list[bool]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs.append(any(isinstance(mode, HandOver) for mode in _get_current_dispatch_mode_stack()))
        if way.now and _is_called_by(where):
            raise torch.OutOfMemoryError("no memory is left for a second run")
        return (x + 1).sin().cos() * w.mean()

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, ADD) as handle:
        for way.now in (1, 0, 0):
            assert_same(expected, step(layers, x))
        assert handle.regions(0)["sin"] == "recompute"
        assert runs[-1]


@pytest.mark.parametrize(("where", "lacks"), [("prove_all", "no_room"), ("_hand_over", "full_device")])
def test_what_the_device_has_no_memory_for_after_a_proof_is_an_error(
    where: str, lacks: str, lab: Lab, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Else backward would read memory of the pool, which has it back."""
    if lab.device.type != "cpu" and where == "_hand_over":
        pytest.skip("a GPU compares these second runs in backward")
    request.getfixturevalue(lacks)
    layers, x = functions(lambda x, w: (x + 1).sin() * w.mean(), lab)
    expected, empty = step(layers, x), torch.empty

    def refuse(*sizes: Any, **options: Any) -> torch.Tensor:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "on_host" and isinstance(options.get("device"), torch.device):
            while frame.f_code.co_name not in ("prove_all", "_hand_over"):
                frame = frame.f_back or frame
            if frame.f_code.co_name == where:
                raise torch.OutOfMemoryError("no memory is left")
        return empty(*sizes, **options)

    with offloaded(layers, lab, ADD):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse)
            with pytest.raises(
                RuntimeError, match=r"the device has no memory for .* that a layer has saved, which were"
            ):
                step(layers, x)
        for _ in range(2):
            assert_same(expected, step(layers, x))


@pytest.mark.usefixtures("no_room", "nothing_recomputed")
def test_what_a_layer_returns_and_saves_is_on_the_device_once(lab: Lab) -> None:
    """Also where it was on the host while the layer ran again."""
    layers, x = functions(lambda x, w: [y := x + 1, y.sin() * w.mean()], lab)
    with offloaded(layers, lab, ADD):
        y, z = layers[0](x)
        sin, _ = (node for node, _ in z.grad_fn.next_functions)
        assert sin._saved_self.data_ptr() == y.data_ptr()


@pytest.mark.usefixtures("no_room")
def test_what_a_second_run_is_compared_with_need_not_be_pinned(lab: Lab) -> None:
    """Where neither the device nor pinned memory has room for it."""
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step(layers, x)
    with offloaded(layers, lab, max_host_bytes=4096) as handle:
        assert_same(expected, step(layers, x))
        assert handle.stats().pinned_bytes <= 4096
        assert "recompute" in handle.regions(0).values()


@pytest.mark.parametrize(("module", "name"), [(run_again, "pop_hooks"), (HandOver, "__exit__")])
def test_an_interrupt_leaves_nothing_of_a_second_run(
    module: Any, name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it comes before hooks are taken off, or a mode: all later layers would be seen by them."""
    layers, x = build("decoder", LAYERS, lab.device)
    expected = step(layers, x)
    take_off, calls = getattr(module, name), []

    def interrupted(*what: Any) -> None:
        calls.append(what)
        if len(calls) == 1:
            raise KeyboardInterrupt
        take_off(*what)

    monkeypatch.setattr(module, name, interrupted)
    with offloaded(layers, lab, {"*mm": "keep", "*": "recompute"}) as handle:
        with pytest.raises((KeyboardInterrupt, run_again.AnotherWayError)):
            step(layers, x)
        for _ in range(2):
            assert_same(expected, step(layers, x))
        assert not _get_current_dispatch_mode_stack()
        assert "recompute" in handle.regions(0).values()


@pytest.mark.parametrize("number", [0, 2])
def test_an_interrupt_before_a_tensor_is_packed_leaves_no_hooks(number: int, lab: Lab) -> None:
    """What the program computes next, in front of all layers, would be packed by them."""
    layers, x = build("decoder", LAYERS, lab.device)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH, device=lab.device), *layers])
    expected = step(model, x)

    def interrupt(*_: object) -> None:
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack.__self__.throw(KeyboardInterrupt)  # a signal that came in an operation is told where Python runs next

    with offloaded(layers, lab) as handle:
        assert_same(expected, step(model, x))
        hook = [*layers[1].modules()][1 + number].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(model, x)
        hook.remove()
        for _ in range(2):
            assert_same(expected, step(model, x))
        assert "recompute" in handle.regions(0).values()


_SCRATCH = [0]


@torch.library.custom_op("offload_tests::with_scratch", mutates_args=())
def with_scratch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention without dropout, whose kernel saves the state of a generator that it has never written."""
    _COUNT[0] += _SCRATCH[0]
    return x.sin(), torch.full((2,), _COUNT[0], device=x.device)


with_scratch.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], *output),
)


@pytest.mark.usefixtures("no_room")
def test_small_tensors_that_come_out_with_other_bits_are_no_second_run_of_another_way(lab: Lab) -> None:
    """Also if they were the same when the layer was proven."""
    layers, x = functions(lambda x, w: with_scratch(x * 2)[0].exp().cos() * w.mean(), lab)
    expected = step(layers, x)
    with offloaded(layers, lab, {"*with_scratch*": "keep", "*": "recompute"}, min_bytes=64) as handle:
        for _SCRATCH[0] in (0, 1, 1):
            assert_same(expected, step(layers, x))
        assert handle.regions(0)["exp"] == "recompute"


TRIED: list[StorageWeakRef] = []


def test_a_device_too_full_for_a_second_run_has_what_the_run_is_compared_with_on_the_host(lab: Lab) -> None:
    """The memory of what the layer saves, unless the program holds it: views of one storage, and the layer's output."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if len(TRIED) == 1:
            assert not TRIED[0].expired()
            TRIED.append(TRIED[0])
            raise torch.OutOfMemoryError("no memory is left for a second run")
        assert len(TRIED) != 2 or TRIED[0].expired()
        one, other = (x + 1).chunk(2, -1)
        TRIED.append(StorageWeakRef(one.untyped_storage()))
        return (one.sin() * other.cos() * w.mean()).repeat(1, 1, 2).exp()

    layers, x = functions(function, lab)
    TRIED[:] = [StorageWeakRef(x.untyped_storage())] * 3
    expected = step(layers, x)
    TRIED.clear()
    with offloaded(layers, lab, ALL) as handle:
        for _ in range(3):
            assert_same(expected, step(layers, x))
        assert handle.regions(0)["add"] == "recompute"


@pytest.mark.parametrize("policies", [ALL, ADD], ids=["all", "sums kept"])
def test_an_attribute_that_is_an_inference_tensor(policies: dict[str, str], lab: Lab) -> None:
    def layer() -> nn.Module:
        with torch.inference_mode():
            positions = torch.linspace(0, 1, WIDTH, device=lab.device)
            made = {"positions": positions, "unread": torch.zeros(1, device=lab.device)}
        return Composed(
            lambda own, x: (own.lin(x).sin() + own.positions).tanh() * x, lin=nn.Linear(WIDTH, WIDTH), **made
        )

    layers, x = build(layer, LAYERS, lab.device)
    assert assert_bits(partial(step, layers, x), layers, lab, policies)["sin"] == "recompute"


def test_what_is_read_behind_what_depends_on_data_and_was_not_before(lab: Lab) -> None:
    """The second run skips it, and begins anew when an operation would read it."""
    way = Way()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = x.exp()
        skipped, needed = kept.sin(), kept.cos()
        (rows,) = (x[..., 0] > 0).flatten().nonzero(as_tuple=True)
        y = needed.flatten(0, 1)[rows]
        if way.now:
            y = y * skipped.flatten(0, 1)[rows]
        return x + y.tanh().sum(0) * w.mean()

    layers, x = functions(function, lab)
    expected = []
    for way.now in (0, 1):
        expected.append(step(layers, x))
    with offloaded(layers, lab, {"exp": "keep", "*": "recompute"}):
        for way.now in (0, 0, 1, 1, 0):
            assert_same(expected[way.now], step(layers, x))


def test_policies_that_differ_behind_what_depends_on_data(lab: Lab) -> None:
    """There, saved tensors have no numbers: what was to be recomputed is offloaded where some is to be kept."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        tokens = (x.flatten(0, -2) @ w).tanh()
        (rows,) = (tokens[:, 0] > 0).nonzero(as_tuple=True)
        chosen = tokens[rows].sin().exp()
        return tokens.index_add(0, rows, chosen).cos().view_as(x) * x

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, {"exp": "keep", "*": "recompute"}, 1) as handle:
        for _ in range(3):
            before = handle.stats().offloaded_bytes
            assert_same(expected, step(layers, x))
        regions = handle.regions(0)
        assert regions["tanh"] == "recompute"
        assert [regions[name] for name in ("index", "exp", "index_add")] == ["offload", "keep", "offload"]
        assert handle.stats().offloaded_bytes - before > x.nbytes


def _resized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(0, device=x.device).resize_(x.shape)
    torch.mul(x.detach(), 2, out=memory)
    return ((x * memory).sin() * w.mean()).tanh()


def _set(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = x * 1.5
    alias = torch.empty(0, device=x.device).set_(made.detach())
    alias.mul_(0.5)
    return (made.sin() * w.mean()).tanh()


def _given_memory(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = x * 1.5
    alias = torch.empty(0, device=x.device)
    alias.set_(made.detach().untyped_storage(), 0, x.shape, x.stride())
    alias.add_(0.5)
    return (made.sin() * w.mean()).tanh()


def _reshaped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = (x * 1.5).contiguous()
    alias = torch.ops.aten._reshape_alias(made, [made.numel()], [1])
    return (alias.sin() * w.mean()).tanh().view_as(x)


ALIASES = {"resize_": _resized, "set_": _set, "set_ of a storage": _given_memory, "reshape_alias": _reshaped}


@pytest.mark.parametrize("policies", [ALL, {"sin": "keep", "*": "recompute"}], ids=["all", "sines kept"])
@pytest.mark.parametrize("function", ALIASES.values(), ids=list(ALIASES))
def test_other_views_of_memory(function: Callable[..., torch.Tensor], policies: dict[str, str], lab: Lab) -> None:
    assert "recompute" in assert_right(function, lab, policies).values()


def test_memory_that_is_reshaped_before_it_is_filled_makes_nothing_run_again(lab: Lab) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = x @ w
        memory = torch.empty(x.shape, device=x.device)
        torch.ops.aten._reshape_alias(memory, [x.numel()], [1]).copy_(x.detach().flatten())
        return (product.tanh() + memory).sin() * w.mean()

    layers, x = build(lambda: Function(function), 1, lab.device)
    expected = step(layers, x)
    with offloaded(layers, lab, {"mm": "keep", "tanh": "keep", "*": "recompute"}) as handle:
        for _ in range(2):
            step(layers, x)
        with Seen() as seen:
            assert_same(expected, step(layers, x))
        assert handle.regions(0)["add"] == "recompute"
    assert seen.times["mm"] == 3  # forward, and two gradients


def test_two_threads_that_ask_for_tensors_of_one_layer_run_it_once(lab: Lab) -> None:
    runs: list[Any] = []

    def fork(own: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(threading.get_ident())
        if torch._C._current_graph_task_id() >= 0:
            time.sleep(0.2)  # the other thread comes meanwhile
        return own.lin(x).sin().exp(), own.lin(x + 1).cos().exp()

    layers, x = build(lambda: Composed(fork, lin=nn.Linear(WIDTH, WIDTH)), 1, lab.device)

    def backward(output: torch.Tensor, start: threading.Barrier) -> None:
        start.wait(30)
        loss_of(output).backward()

    def run() -> None:
        start = threading.Barrier(2)
        in_threads(*(partial(backward, one, start) for one in layers[0](x)))

    def plain() -> None:
        one, other = layers[0](x)
        (loss_of(one) + loss_of(other)).backward()

    expected = gradients(leaves_of(layers, x), plain)
    with offloaded(layers, lab):
        for _ in range(2):
            gradients(leaves_of(layers, x), plain)
        runs.clear()
        found = gradients(leaves_of(layers, x), run)
    assert len(runs) == 2
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)  # two threads add to one gradient in any order


def test_what_was_recomputed_is_freed_once_its_operation_has_read_it(lab: Lab) -> None:
    """Before gradients are summed over what was broadcast, which needs memory. A user's function may read twice."""
    made: dict[int, StorageWeakRef] = {}
    freed: list[bool] = []

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.gelu(ReadsTwice.apply(x.sin()) @ weight)
        made[id(weight)] = StorageWeakRef(y.untyped_storage())
        y = y * weight[0]
        if y.grad_fn is not None and torch._C._current_graph_task_id() == -1:
            y.grad_fn.register_hook(lambda *_: freed.append(made[id(weight)].expired()))
        return y

    layers, x = functions(function, lab)
    expected = step(layers, x)
    assert freed == [False] * LAYERS
    with offloaded(layers, lab):
        step(layers, x)  # learned and proven
        freed.clear()
        assert_same(step(layers, x), expected)
    assert freed == [True] * LAYERS


def test_what_was_kept_is_freed_once_the_second_run_has_read_it(lab: Lab) -> None:
    """Also while other dropped tensors of the layer are still to be asked for."""
    made: dict[int, StorageWeakRef] = {}
    freed: list[bool] = []

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kept = x.tanh().sin()
        if kept.grad_fn is not None and torch._C._current_graph_task_id() == -1:
            made[id(weight)] = StorageWeakRef(kept.untyped_storage())
            kept.grad_fn.register_prehook(lambda *_: freed.append(made[id(weight)].expired()))
        return (kept.cos() * weight.mean()).exp()

    layers, x = functions(function, lab)
    expected = step(layers, x)
    with offloaded(layers, lab, {"sin": "keep", "*": "recompute"}):
        for _ in range(3):  # learned, proven, and followed
            freed.clear()
            assert_same(step(layers, x), expected)
    assert freed == [True] * LAYERS
