"""Steps beside the next forward: whoever reads a parameter waits for it, or finds an error or NaN."""

import copy
import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from faults import FAULTS, slowly
from lab import Lab, LateOptimizer
from models import assert_same
from torch import nn
from training import WIDTH, Training, adamw, batch, loss_of, plain_steps, resident, stream, values

from offload.base.torch_private import refuse_access
from offload.device.cuda import CaptureError
from offload.optimizer.chunks import StepWait
from offload.optimizer.early import FreedGradient
from offload.optimizer.forward import ForwardSteps

LATE_S = 0.05


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    torch._dynamo.reset()


class Late:
    """A layer whose next step writes sevens, which are late."""

    def __init__(self, lab: Lab, parameters: int = 1, **options: Any) -> None:
        self.lab = lab
        self.layer = nn.Linear(8, 8, bias=False, device=lab.device)
        self.weight = self.layer.weight
        self.others = [nn.Parameter(torch.zeros_like(self.weight)) for _ in range(parameters - 1)]
        with torch.no_grad():
            self.weight.zero_()
        self.optimizer = LateOptimizer(lab, [self.weight, *self.others], LATE_S)
        self.handle = stream(self.optimizer, chunk_bytes=256, **{"overlap_forward": True, **options})
        for parameter in (self.weight, *self.others):
            parameter.grad = torch.ones_like(parameter)

    def step(self) -> None:
        self.optimizer.late = True
        self.optimizer.step()

    def read(self, how: Callable[["Late"], Any]) -> bool:
        """Whether what is read is the step's."""
        found = how(self)
        found = found.detach().clone()
        self.lab.drain()
        return bool((found == 7.0).all())


def tied(late: Late) -> torch.Tensor:
    other = nn.Embedding(8, 8)
    other.weight = late.weight
    return other(torch.tensor([0, 1], device=late.lab.device))


def changed(late: Late) -> torch.Tensor:
    """A program that changes the parameter after its step."""
    with torch.no_grad():
        late.weight.mul_(2.0).add_(-7.0)
    return late.weight


def evaluated(late: Late) -> torch.Tensor:
    with torch.inference_mode():
        return late.layer(torch.eye(8, device=late.lab.device))


def moved(late: Late) -> torch.Tensor:
    late.layer.to(torch.float64)
    return late.weight


def copied(weight: torch.Tensor) -> torch.Tensor:
    assert type(weight) is nn.Parameter
    return weight


READERS: dict[str, Callable[[Late], Any]] = {
    "a layer": lambda late: late.layer(torch.eye(8, device=late.lab.device)),
    "evaluation": evaluated,
    "another layer": tied,
    "an operation": lambda late: 0.0 + late.weight,
    "state_dict": lambda late: late.layer.state_dict()["weight"],
    "a copy of the module": lambda late: copied(copy.deepcopy(late.layer).weight),
    ".data": lambda late: late.weight.data,
    "a list": lambda late: torch._foreach_add([late.weight], 0.0)[0],
    "functional_call": lambda late: torch.func.functional_call(
        late.layer, {"weight": late.weight}, torch.eye(8, device=late.lab.device)
    ),
    "a change": changed,
    "another dtype": moved,
    "remove()": lambda late: (late.handle.remove(), copied(late.weight))[1],
    "synchronize()": lambda late: (late.handle.synchronize(), late.weight)[1],
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_waits(reader: str, lab: Lab) -> None:
    late = Late(lab)
    late.step()
    assert late.read(READERS[reader])
    assert late.handle.stats().forward_parameters == 1
    assert type(late.weight) is nn.Parameter
    assert isinstance(late.weight.grad, torch.Tensor | None)


def test_who_asks_for_sizes_does_not_wait(lab: Lab) -> None:
    late = Late(lab)

    def sizes() -> list[Any]:
        one = late.weight
        return [one.size(), one.dim(), one.numel(), one.shape, one.dtype, one.nbytes, one.is_floating_point()]

    before = sizes()
    late.step()
    assert sizes() == before
    assert type(late.weight) is not nn.Parameter
    late.handle.synchronize()


@pytest.mark.timeout(60)
def test_another_thread_reads_what_the_program_is_about_to_leave(lab: Lab) -> None:
    """One that logs weights: the parameter has its numbers afterwards."""
    late = Late(lab)
    found = list[bool]()

    def log() -> None:
        while type(late.weight) is nn.Parameter:
            time.sleep(0.001)
        found.append(bool((late.weight == 7.0).all()))

    logs = threading.Thread(target=log, daemon=True)
    logs.start()
    before = sys.gettrace()
    sys.settrace(slowly(ForwardSteps._leave))
    late.step()
    sys.settrace(before)
    logs.join()
    assert found == [True]
    assert late.read(READERS["an operation"])


def read_late(lab: Lab) -> bool:
    late = Late(lab)
    late.step()
    return late.read(READERS["a layer"])


def late_gradient(lab: Lab) -> bool:
    weight = nn.Parameter(torch.zeros(1000, device=lab.device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    stream(optimizer, overlap_forward=True)
    weight.grad = torch.zeros_like(weight)
    lab.write_late(weight.grad, -7.0, LATE_S)
    optimizer.step()
    lab.drain()
    return bool((weight == 7.0).all())


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("wait", "scenario"),
    [(StepWait.NEXT_FORWARD, read_late), (StepWait.GRADIENT, late_gradient)],
    ids=lambda one: getattr(one, "name", ""),
)
def test_each_wait_is_needed(wait: Any, scenario: Callable[[Lab], bool], lab: Lab) -> None:
    assert scenario(lab), "wrong with all waits"
    lab.drop(wait)
    assert not scenario(lab), wait.value


def kept_data(late: Late) -> Callable[[], torch.Tensor]:
    data = late.weight.data
    return lambda: data


def kept_rows(late: Late) -> Callable[[], torch.Tensor]:
    rows = late.weight.detach()[2:]
    return lambda: rows


def compiled(late: Late) -> Callable[[], torch.Tensor]:
    run = torch.compile(late.layer, backend="eager")
    run(torch.eye(8, device=late.lab.device))
    return lambda: run(torch.eye(8, device=late.lab.device))


def of_another_class(late: Late) -> Callable[[], torch.Tensor]:
    """As some libraries have for weights that they hold in a form of their own."""
    late.weight.__class__ = type("Own", (nn.Parameter,), {})
    return lambda: late.weight


def told_by_a_tensor(late: Late) -> Callable[[], torch.Tensor]:
    """The program may change such an option in place, while the step still reads it."""
    late.optimizer.param_groups[0]["lr"] = torch.tensor(1.0)
    return lambda: late.weight


def gradient_in_a_buffer(late: Late) -> Callable[[], torch.Tensor]:
    """Which the program may fill with zeros at once."""
    buffer = torch.ones(64, device=late.lab.device)
    late.weight.grad = buffer.view(8, 8)
    return lambda: late.weight + 0.0 * buffer[0]


def gradient_of_another_class(late: Late) -> Callable[[], torch.Tensor]:
    late.weight.grad.__class__ = type("Own", (torch.Tensor,), {})
    return lambda: late.weight


@pytest.mark.parametrize(
    "begin",
    [
        kept_data,
        kept_rows,
        compiled,
        of_another_class,
        told_by_a_tensor,
        gradient_in_a_buffer,
        gradient_of_another_class,
    ],
)
def test_where_reads_are_not_seen_the_step_waits(begin: Any, lab: Lab) -> None:
    late = Late(lab)
    read = begin(late)
    late.step()
    assert late.handle.stats().forward_parameters == 0
    assert late.read(lambda _: read())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch, in compiling
@pytest.mark.parametrize("reset", [False, True])  # which takes the library's callback away
def test_code_is_compiled_when_no_parameter_is_unread(reset: bool, lab: Lab) -> None:
    late = Late(lab, parameters=3)

    @torch.compile(backend="eager", fullgraph=not reset)
    def run(x: torch.Tensor) -> torch.Tensor:
        return 0.0 + late.layer(x)

    late.step()
    if reset:
        torch._dynamo.reset()
    assert late.read(lambda _: run(torch.eye(8, device=lab.device)))
    late.step()
    assert late.read(lambda _: run(torch.eye(8, device=lab.device)))
    assert late.handle.stats().forward_parameters == 3


def scripted(late: Late) -> Callable[[], torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated by later versions of PyTorch
        run = torch.jit.script(late.layer)
    return lambda: run(torch.eye(8, device=late.lab.device))


def transformed(late: Late) -> Callable[[], torch.Tensor]:
    return lambda: torch.func.grad(lambda weight: weight.square().sum())(late.weight)


def exported_gradient(late: Late) -> Callable[[], torch.Tensor]:
    return lambda: torch.from_dlpack(torch.utils.dlpack.to_dlpack(late.weight.grad))


@pytest.mark.parametrize("begin", [scripted, transformed, exported_gradient])
def test_what_asks_no_function_is_refused(begin: Any, lab: Lab) -> None:
    late = Late(lab)
    read = begin(late)
    late.step()
    if refuse_access is None:  # PyTorch was built for the CPU alone
        assert read().isnan().all()
    else:
        with pytest.raises(RuntimeError, match=r"call synchronize\(\) of the streamed optimizer's handle first"):
            read()
    assert late.read(READERS["a layer"])
    assert (late.weight.grad == 1.0).all()


def test_graphs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured cannot wait for the step; a replay asks nobody, and waits for all."""
    late = Late(lab)
    late.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(lab.backend), "capturing", True)
        with pytest.raises(CaptureError, match=r"call synchronize\(\) of the handle first"):
            late.layer(torch.eye(8, device=lab.device))
    data = late.handle._forward._unread[late.weight].data[0]
    with suppress(AttributeError, TypeError):
        torch.cuda.CUDAGraph.replay(object())
    assert late.read(lambda _: data)


def test_another_stream_lets_the_host_wait(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(lab)
    late.step()
    monkeypatch.setattr(lab.backend, "compute_stream_id", object)
    waits = lab.record_host_waits()
    assert late.read(READERS["a layer"])
    assert waits == [StepWait.NEXT_FORWARD]


def test_each_reader_waits_for_its_own_parameter(lab: Lab) -> None:
    late = Late(lab, parameters=4)
    late.step()
    waits = lab.count_waits()
    assert late.handle.stats().forward_parameters == 4
    late.optimizer.zero_grad()
    late.others[0].grad = torch.zeros(8, 8, device=lab.device)
    assert [one.requires_grad for one in late.others] == [True] * 3
    assert waits == []
    assert late.read(READERS["a layer"])
    assert waits == [StepWait.NEXT_FORWARD]
    assert [type(one).__name__ for one in late.others] == ["UnreadParameter"] * 3
    late.optimizer.step()
    assert waits.count(StepWait.NEXT_FORWARD) == 4


@pytest.mark.parametrize("how", ["a norm", "zeroed in place", "added to"])
def test_gradients_wait_as_well(how: str, lab: Lab) -> None:
    """The step may still read them; ``zero_grad()`` only drops them."""
    late = Late(lab)
    graph = (late.weight + 1.0).sum() if how == "added to" else None  # it does not save the weights
    late.step()
    waits = lab.count_waits()
    if graph is not None:
        graph.backward()
        assert (late.weight.grad == 2.0).all()
    elif how == "a norm":
        assert late.weight.grad.norm() == 8.0
    else:
        late.optimizer.zero_grad(set_to_none=False)
        assert (late.weight.grad == 0.0).all()
    assert waits == [StepWait.NEXT_FORWARD]


def test_a_gradient_is_held_until_its_step_is_over(lab: Lab) -> None:
    lab.backend.poison = True
    late = Late(lab)
    memory = late.weight.grad.untyped_storage()._weak_ref()
    late.step()
    late.optimizer.zero_grad()
    gc.collect()
    assert not torch.UntypedStorage._expired(memory)
    late.read(READERS["a layer"])
    assert torch.UntypedStorage._expired(memory)
    torch.UntypedStorage._free_weak_ref(memory)


def test_parameters_are_stepped_in_the_order_in_which_forward_reads_them(lab: Lab) -> None:
    stepped: list[int] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            stepped.extend(p.numel() for group in self.param_groups for p in group["params"])

    weights = [nn.Parameter(torch.ones(size, device=lab.device)) for size in (3, 5, 7)]
    optimizer = Noting([{"params": [weights[0]]}, {"params": weights[1:]}], lr=0.1)
    stream(optimizer, overlap_forward=True, chunk_bytes=1)
    for _ in range(2):
        stepped.clear()
        sum(weights[number].sum() for number in (2, 0, 1)).backward()
        optimizer.step()
    assert stepped == [7, 3, 5]


def test_gradients_that_two_parameters_share(lab: Lab) -> None:
    late = Late(lab, parameters=2)
    late.others[0].grad = late.weight.grad
    late.step()
    assert late.handle.stats().forward_parameters == 1
    assert late.read(lambda late: late.others[0])
    assert late.read(READERS["a layer"])


def test_a_graph_from_before_the_step_is_refused(lab: Lab) -> None:
    """As without streaming."""
    run = Training(lab.device, overlap_forward=True)
    run.steps(range(2))
    loss = loss_of(run.model, 2)
    run.backward(2)
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("from_last", "steps"), [(36, False), (6, True), (2, True)], ids=["in the step", "before readers", "behind it"]
)
def test_a_failed_copy_is_told_once(from_last: int, steps: bool, lab: Lab) -> None:
    """And what is read after a checkpoint was loaded is the checkpoint's."""
    if lab.device.type != "cpu":
        return
    run = Training(lab.device, overlap_forward=True)
    run.steps(range(1))
    with FAULTS["copy fails"](lab, None) as copies:
        run.steps(range(1, 2))
    saved = run.checkpoint
    run.backward(2)
    stepped = False
    with FAULTS["copy fails"](lab, len(copies.places) - from_last), suppress(RuntimeError):
        run.optimizer.step()
        stepped = True
        run.model.state_dict()
        run.optimizer.state_dict()
        raise AssertionError("nobody was told")
    assert stepped == steps
    assert {type(one) for one in run.model.parameters()} == {nn.Parameter}
    with pytest.raises(RuntimeError, match="parameters and optimizer state must belong to one step"):
        run.optimizer.state_dict()
    if stepped:
        run.handle.synchronize()
    run.load(saved)
    assert_same(resident(lab.device, range(2)), run.values)
    run.steps(range(2, 4))
    assert_same(resident(lab.device, range(4)), run.values)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone  # others' copies would come first, too
def test_a_number_that_the_program_reads_does_not_come_after_all_state(lab: Lab) -> None:
    """A GPU has one queue of copies to the host, in which a step puts gigabytes."""
    if lab.device.type == "cpu":
        return
    parameters = [nn.Parameter(torch.zeros(1 << 23, device=lab.device)) for _ in range(24)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    stream(optimizer, overlap_forward=True, chunk_bytes="32MiB")
    number = torch.ones((), device=lab.device)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        lab.drain()
        optimizer.step()
    assert number.item() == 1.0
    assert not lab.state_d2h_stream.record_event().query()
    lab.drain()


def test_what_is_noted_of_readers_does_not_grow(lab: Lab) -> None:
    run = Training(lab.device, overlap_forward=True)
    weight = run.model[0].weight
    run.steps(range(3))
    before = sys.getrefcount(weight)
    run.steps(range(3, 8))
    assert sys.getrefcount(weight) == before


def test_a_dropped_optimizer_leaves_its_parameters_stepped(lab: Lab) -> None:
    run = Training(lab.device, overlap_forward=True)
    run.steps(range(3))
    model, run.optimizer, run.handle = run.model, None, None
    assert {type(one) for one in model.parameters()} == {nn.Parameter}
    assert not [one for one in model.parameters() if one._backward_hooks]
    expected = Training(lab.device, streamed=False)
    expected.steps(range(3))
    assert_same([*expected.model.parameters()], [*model.parameters()])


def test_a_forward_that_fails_changes_nothing(lab: Lab) -> None:
    run = Training(lab.device, overlap_forward=True)
    run.steps(range(2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run.model(batch(0, run.model)[:, 1:])
    run.optimizer.step()  # of no gradients
    run.steps(range(2, 4))
    assert_same(resident(lab.device, range(4)), run.values)


@pytest.mark.parametrize("consume", [False, True])
def test_backward_leaves_a_part_to_the_next_forward(consume: bool, lab: Lab) -> None:
    """Once a backward has shown in which order gradients come; microbatches before the last one step nothing."""
    lab.adverse()

    def trained(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).to(lab.device)
        optimizer = adamw(model.parameters())
        handle = stream(optimizer, chunk_bytes="4KiB", **options) if options else None
        for number in range(5):
            with nullcontext() if handle is None else handle.no_step():
                loss_of(model, number).backward()
            loss_of(model, number + 9).backward()
            if handle is not None:
                left = [name for name, one in model.named_parameters() if type(one.grad) is torch.Tensor]
                assert not consume or ("0.weight" not in left and (number > 0) == ("3.weight" in left))
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            in_forward = handle.stats().forward_parameters / (4 * 16)
            assert 0.1 < in_forward < 0.9
            assert handle.stats().backward_chunks > 0
        return values(model, optimizer)

    assert_same(trained(), trained(in_backward=True, overlap_forward=True, consume_gradients=consume))


@pytest.mark.parametrize("resident", ["biases", "everything"])
def test_parameters_whose_state_is_on_the_device_are_not_left_to_forward(resident: str, lab: Lab) -> None:
    """They have no copies to hide there, and backward frees their gradients."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).to(lab.device)
    biases = [layer.bias for layer in model]
    nbytes = sum(2 * one.nbytes for one in (biases if resident == "biases" else model.parameters()))
    optimizer = adamw(model.parameters())
    options = {"in_backward": True, "consume_gradients": True, "overlap_forward": True}
    handle = stream(optimizer, chunk_bytes="4KiB", resident_bytes=nbytes, **options)
    plain_steps(model, optimizer, range(2))
    loss_of(model, 2).backward()
    assert handle.stats().resident_bytes == nbytes
    assert {type(one.grad) for one in biases} == {FreedGradient}
    assert (torch.Tensor in {type(layer.weight.grad) for layer in model}) is (resident == "biases")


def test_refused_at_once(lab: Lab) -> None:
    own = type("Sharded", (nn.Parameter,), {})(torch.zeros(2, device=lab.device))
    message = f"unless each parameter is an nn.Parameter on the device, got a Sharded on {lab.device}; leave it out"
    with pytest.raises(ValueError, match=message):
        stream(adamw([own]), overlap_forward=True)
