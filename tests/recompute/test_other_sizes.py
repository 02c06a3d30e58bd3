"""Inputs of many sizes: a layer is learned with one of them, and recomputed with any other."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab import Lab
from models import WIDTH, assert_same, build, gradients, leaves_of, loss_of, through
from test_policies import ALL, Function, offloaded
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import offload

pytestmark = pytest.mark.usefixtures("recomputes")

LAYERS = 3
PRODUCTS = {"*mm": "keep", "*": "recompute"}
SOME = {"*mm": "offload", "mul": "offload", "*": "recompute"}


def step(layers: nn.ModuleList, shape: tuple[int, ...], lab: Lab) -> list[torch.Tensor]:
    torch.manual_seed(sum(shape))
    x = torch.randn(*shape, WIDTH).to(lab.device).requires_grad_()

    def run() -> None:
        loss_of(through(layers, x)).backward()

    return gradients(leaves_of(layers, x), run)


class Calls:
    """How often the second layer's forward has run."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.count = 0
        layers[1].register_forward_pre_hook(self)

    def __call__(self, *_: object) -> None:
        self.count += 1

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.mark.parametrize(
    ("kind", "policies", "num_layers"),
    [
        ("decoder", ALL, 0),
        ("gpt", ALL, 2),
        ("gpt", PRODUCTS, 0),
        ("decoder", PRODUCTS, 2),
        ("decoder", SOME, 0),
        ("gpt", SOME, 2),
        ("no room", PRODUCTS, 0),
    ],
)
@pytest.mark.filterwarnings("ignore:policies has patterns that match no region", "ignore:num_layers = model_layers - 1")
def test_one_size_is_learned(
    kind: str, policies: dict[str, str], num_layers: int, lab: Lab, request: pytest.FixtureRequest
) -> None:
    """Also where there is no room for a second run beside what a layer has saved, and backward compares two."""
    if kind == "no room":
        kind = request.getfixturevalue("no_room") or "decoder"
    shapes = [(2, 8), (2, 16), (2, 11), (2, 64), (2, 3), (2, 57), (2, 100), (2, 8), (2, 1)]
    layers, _ = build(kind, LAYERS, lab.device)
    expected = [step(layers, shape, lab) for shape in shapes]
    calls = Calls(layers)
    with offloaded(layers, lab, policies, num_layers=num_layers):
        ran = []
        for shape, gradients_of_shape in zip(shapes, expected, strict=True):
            assert_same(gradients_of_shape, step(layers, shape, lab))
            ran.append(calls.since())
    assert ran[0] > 2  # learned and compared
    assert policies is ALL or min(ran[1:3]) > 2  # compared
    assert ran[3:7] == [2] * 4  # forward, and once more in backward


@pytest.mark.filterwarnings("ignore:memory_budget = ")  # a layer of a new size is run twice once, a third of this model
def test_a_size_is_recomputed_by_the_plan_that_is_followed(lab: Lab) -> None:
    """Also a size that ran under another plan, which dropped less."""
    layers, _ = build("decoder", LAYERS, lab.device)
    shapes = [(2, length) for length in (36, 34, 36, 30, 42, 30)]
    expected = [step(layers, shape, lab) for shape in shapes]
    profile = offload.profile_layers(layers, lambda: step(layers, shapes[0], lab), min_bytes=0, device=lab.device)
    options: dict[str, Any] = {"min_bytes": 0, "max_host_bytes": 0, "device": lab.device}
    plans = []
    with offload.offload_layers(layers, memory_budget=8 * profile.saved_bytes // 10, **options) as handle:
        for shape, gradients_of_shape in zip(shapes, expected, strict=True):
            assert_same(gradients_of_shape, step(layers, shape, lab))
            plans.append(handle.plan)
    *_, before, after, last = plans
    assert before is not after
    assert after is last
    assert min(before.recompute_s, after.recompute_s) > 0


class Counts(nn.Module):
    """Counts its forwards in a list, so that it must not run again, and notes how many dispatch modes see them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.modes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append(len(_get_current_dispatch_mode_stack()))
        return (x @ self.weight).sin().tanh()


@pytest.mark.usefixtures("nothing_recomputed")
@pytest.mark.filterwarnings("ignore:policies has patterns that match no region")
def test_a_layer_that_is_never_recomputed_is_learned_with_one_size(lab: Lab, unplanned: set[str]) -> None:
    unplanned.add("is never recomputed")
    layers, _ = build(Counts, LAYERS, lab.device)
    with offloaded(layers, lab, SOME):
        for length in (8, 16, 11, 40):
            step(layers, (2, length), lab)
    assert layers[1].modes == [1, 0, 0, 0]


def _pooled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    pooled = F.max_pool1d((x @ w).sin().transpose(1, 2), 4, ceil_mode=True)
    return F.interpolate(pooled.mul(2).tanh(), size=x.shape[1]).transpose(1, 2).contiguous() + x


def _square(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A result whose length is the square of the input's."""
    pairs = (x[:, :, None] * (x @ w)[:, None]).flatten(1, 2).sin().mul(2).tanh()
    return pairs.unflatten(1, (x.shape[1], x.shape[1])).sum(2)


def _odd_differs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same number of nodes, with results in other layouts."""
    first, second = (0, 1) if x.shape[1] % 2 else (0, 2)
    return (x @ w).sin().transpose(first, second).contiguous().mul(2).transpose(first, second).tanh()


def _padded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Results of a multiple of eight, as long as the input for the first lengths of all."""
    length = x.shape[1]
    y = F.pad(x, (0, 0, 0, -length % 8)) @ w
    return ((y + 1).sin() * (y.mul(2) + 1).tanh())[:, :length] + x


@pytest.mark.parametrize("policies", [PRODUCTS, SOME], ids=["products", "some"])
@pytest.mark.filterwarnings("ignore:policies has patterns that match no region")
def test_sizes_that_follow_from_others_only_mostly(policies: dict[str, str], lab: Lab) -> None:
    layers, _ = build(lambda: Function(_padded), LAYERS, lab.device)
    shapes = [(2, length) for length in (8, 16, 24, 32, 11, 40, 13, 11, 11, 11, 48)]
    expected = [step(layers, shape, lab) for shape in shapes]
    calls, ran = Calls(layers), []
    with offloaded(layers, lab, policies):
        for shape, gradients_of_shape in zip(shapes, expected, strict=True):
            assert_same(gradients_of_shape, step(layers, shape, lab))
            ran.append(calls.since())
    assert ran[9] == 2  # a size that has gone another way is learned, compared, and then known


def test_a_size_that_takes_another_branch_is_learned(lab: Lab) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (y.sin() if x.shape[1] % 2 else y.cos().mul(2)).tanh()

    layers, _ = build(lambda: Function(function), LAYERS, lab.device)
    shapes = [(2, 8), *[(2, 11)] * 3]
    expected = [step(layers, shape, lab) for shape in shapes]
    calls, ran = Calls(layers), []
    with offloaded(layers, lab):
        for shape, gradients_of_shape in zip(shapes, expected, strict=True):
            assert_same(gradients_of_shape, step(layers, shape, lab))
            ran.append(calls.since())
    assert ran == [3, 3, 2, 2]  # one more where it is learned: at once, as the first layer has gone another way


def test_a_size_with_which_a_layer_raises_when_it_runs_again(lab: Lab, unplanned: set[str]) -> None:
    """It is kept, and the program sees no error."""
    runs = Counter[int]()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs[w.data_ptr()] += x.shape[1] == 8
        if runs[w.data_ptr()] > 1:
            raise ValueError("never twice")
        mask = torch.full_like(x, 0.5, requires_grad=False)
        mask = mask + 1 if x.shape[1] == 8 else mask
        return ((x @ w) * mask).sin().tanh()

    layers, _ = build(lambda: Function(function), LAYERS, lab.device)

    def once(length: int) -> list[torch.Tensor]:
        runs.clear()
        return step(layers, (2, length), lab)

    expected = [once(length) for length in (5, 8, 8)]
    with offloaded(layers, lab, PRODUCTS):
        for length, gradients_of_length in zip((5, 8, 8), expected, strict=True):
            assert_same(gradients_of_length, once(length))
    unplanned |= {"is never recomputed"}


TURNED = [0]
"""How often the operation has run."""


def _turn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A result that is laid out in another order than its argument, a seed, and a mask that nobody has asked for."""
    TURNED[0] += not x.is_meta
    return (x.mT + 1).contiguous().mT, x.new_zeros(()), x.new_zeros(0)


SAYS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]] | None] = {
    "nothing": None,
    # Of lengths beyond those that are compared.
    "another order": lambda x: (x.contiguous(), *_turn(x)[1:]) if x.shape[1] > 20 else _turn(x),
    "too much": lambda x: _turn(torch.cat([x, x], 1)),
    "too little": lambda x: _turn(x[:, 1:] if x.shape[1] > 20 else x),
    "another seed": lambda x: (_turn(x)[0], x.new_zeros(2), x.new_zeros(2, 2)),
}
"""What the operation says of its results without memory."""


class Padded(nn.Module):
    """Attention whose mask is padded to a multiple of eight, as PyTorch's kernels need it, if it is none; or all is."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.qkv, self.out, self.what = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.what == "all" and length % 8:
            return self._attend(F.pad(x, (0, 0, 0, -length % 8)))[:, :length]
        return self._attend(x)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        length = x.shape[1]
        mask = torch.where(torch.ones(length, length, dtype=torch.bool, device=x.device).tril(), 0.0, float("-inf"))
        if length % 8:
            mask = F.pad(mask, (0, -length % 8))[:, :length]
        return x + self.out((q @ k.mT + mask).softmax(-1) @ v).tanh()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("room", ["room", "no room"])
@pytest.mark.parametrize("padded", ["mask", "all"])
def test_a_size_whose_operations_are_others_is_recomputed_as_well(
    padded: str, room: str, lab: Lab, request: pytest.FixtureRequest
) -> None:
    """Nothing more is kept, in the first step either; then one such size is learned, and tells of all of its kind."""
    if room == "no room":
        request.getfixturevalue("no_room")
    layers = nn.ModuleList(Padded(padded) for _ in range(8)).to(lab.device)

    def metered(shape: tuple[int, ...]) -> tuple[list[torch.Tensor], int]:
        with offload.memory_meter(lab.device) as meter:
            found = step(layers, shape, lab)
        return found, meter.peak_bytes

    shapes = [(1, length) for length in (251, 253, 504, 504, 552, 456, 552, 512)]
    plain = [metered(shape) for shape in shapes]
    calls, ran = Calls(layers), []
    with offloaded(layers, lab, {"*addmm": "keep", "*": "recompute"}):
        for shape, (expected, plain_bytes) in zip(shapes, plain, strict=True):
            found, peak_bytes = metered(shape)
            assert_same(expected, found)
            assert peak_bytes < 0.65 * plain_bytes
            ran.append(calls.since())
    # It is learned in the forward in which the first layer goes another way, or after the backward in which all do.
    learned = [3, 4] if (padded, room) == ("mask", "no room") else [4, 3]
    assert ran == [4, 3, *learned, 3, 3, 2, 2]


@pytest.mark.parametrize("saved", [False, True], ids=["a view is saved", "the result is saved"])
@pytest.mark.parametrize("says", SAYS)
@pytest.mark.filterwarnings("ignore:policies has patterns that match no region")
def test_operations_that_do_not_say_their_results_size(says: str, saved: bool, lab: Lab) -> None:
    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            result, seed, _ = torch.ops.offload_sizes.turned(x)
            ctx.save_for_backward(result if saved else result.mT, seed)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0].sum()

    layers, _ = build(lambda: Function(lambda x, w: Turn.apply(x @ w).add(x).sin().tanh() * x), LAYERS, lab.device)
    shapes = [(2, length) for length in (8, 16, 11, 40, 13, 22, 22)]
    calls = Calls(layers)
    with torch.library._scoped_library("offload_sizes", "FRAGMENT") as library:
        library.define("turned(Tensor x) -> (Tensor, Tensor, Tensor)")
        library.impl("turned", _turn, lab.device.type.upper())
        if (say := SAYS[says]) is not None:
            library.impl("turned", say, "Meta")
        expected = [step(layers, shape, lab) for shape in shapes]
        with offloaded(layers, lab, {"*turned*": "keep", "*": "recompute"}) as handle:
            for shape, gradients_of_shape in zip(shapes, expected, strict=True):
                TURNED[0] = calls.count = 0
                assert_same(gradients_of_shape, step(layers, shape, lab))
            assert handle.regions(0)["offload_sizes::turned"] == "keep"
    assert TURNED[0] == LAYERS or not (saved or says == "another seed")  # what is handed over has its size
    assert calls.count == 2 or (says.startswith("too") and not saved)  # else it is learned


def _experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The number of results depends on data behind a part whose order of operations does not."""
    MODES.append(len(_get_current_dispatch_mode_stack()))
    tokens = ((x.flatten(0, -2) @ w).sin() @ w).tanh()
    (rows,) = (tokens[:, 0] > 0).nonzero(as_tuple=True)
    chosen = ((tokens[rows] * 2).exp() @ w).sin()
    return (torch.zeros_like(tokens).index_add(0, rows, chosen) * tokens).view_as(x) * x + x


MODES: list[int] = []
"""How many dispatch modes have seen each forward and second run."""


@pytest.mark.parametrize("policies", [ALL, PRODUCTS, SOME], ids=["all", "products", "some"])
@pytest.mark.filterwarnings("ignore:policies has patterns that match no region")
def test_one_size_is_learned_of_what_depends_on_data(policies: dict[str, str], lab: Lab) -> None:
    layers, _ = build(lambda: Function(_experts), LAYERS, lab.device)
    shapes = [(2, length) for length in (8, 16, 11, 40, 3, 21)]
    expected = [step(layers, shape, lab) for shape in shapes]
    with offloaded(layers, lab, policies) as handle:
        for shape, gradients_of_shape in zip(shapes, expected, strict=True):
            MODES.clear()
            assert_same(gradients_of_shape, step(layers, shape, lab))
            if shape == shapes[0]:
                assert MODES[:2] == [1, 1]  # learned and compared
        assert "recompute" in handle.regions(0).values()
        assert len(MODES) == 2 * LAYERS
        assert MODES[:LAYERS] == [0] * LAYERS


FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, str]]] = {
    "experts": (_experts, ALL),
    "experts, products kept": (_experts, PRODUCTS),
    "experts, some offloaded": (_experts, SOME),
    "scores": (lambda x, w: (x @ x.transpose(1, 2)).mul(0.1).softmax(-1).sin() @ (x @ w).tanh(), SOME),
    "flat": (lambda x, w: (x.flatten(0, 1) @ w).sin().mul(2).tanh().view_as(x), PRODUCTS),
    "pooled": (_pooled, PRODUCTS),
    "in parts": (lambda x, w: torch.cat([(part @ w).sin().mul(2).tanh() for part in x.split(8, 1)], 1), SOME),
    "other order if long": (
        lambda x, w: (x @ w).sin().mul(2).tanh() if x.shape[1] > 20 else (x @ w).tanh().mul(2).sin(),
        PRODUCTS,
    ),
    "square": (_square, SOME),
    "other layouts if odd": (_odd_differs, PRODUCTS),
}


@pytest.mark.parametrize(("function", "policies"), FUNCTIONS.values(), ids=list(FUNCTIONS))
@pytest.mark.filterwarnings("ignore:policies has patterns that match no region")
def test_gradients_are_the_same_bits_at_any_size(
    function: Callable[..., torch.Tensor], policies: dict[str, str], lab: Lab
) -> None:
    layers, _ = build(lambda: Function(function), LAYERS, lab.device)
    draw = random.Random(0)
    shapes = [(draw.choice([2, 2, 2, 3]), draw.randint(1, 40)) for _ in range(20)]
    expected = {shape: step(layers, shape, lab) for shape in shapes}
    with offloaded(layers, lab, policies) as handle:
        for shape in shapes:
            assert_same(expected[shape], step(layers, shape, lab))
        assert "recompute" in handle.regions(0).values()
