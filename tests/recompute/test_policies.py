"""Regions of layers, each kept, offloaded or computed again: gradients are the same bits, and the memory is let go."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lab import Lab
from models import BLOCKS, WIDTH, Seen, assert_same, build, gradients, leaves_of, loss_of, step_gradients, through
from torch import nn

import offload
from offload.recompute.layer_policies import LayerPolicies
from offload.recompute.operations import known_operation

LAYERS = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:policies has patterns that match no region"),  # one list for all blocks
    pytest.mark.usefixtures("recomputes"),
]
ALL = {"*": "recompute"}
PRODUCTS = {"*mm": "offload", "*attention*": "offload", "convolution": "offload", "*": "recompute"}
MIXED = {
    "*norm*": "recompute",
    "mul": "recompute",
    "silu": "recompute",
    "gelu": "recompute",
    "mm": "keep",
    "*": "offload",
}
POLICIES = {"all": ALL, "products offloaded": PRODUCTS, "mixed": MIXED}


def offloaded(layers: Any, lab: Lab, policies: dict[str, str] = ALL, num_layers: int = 0, **options: Any) -> Any:
    return offload.offload_layers(
        layers, num_layers, policies=policies, device=lab.device, **{"min_bytes": 0, **options}
    )


class Function(nn.Module):
    """A layer that is one function of its input and a weight, whose mean is not zero."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1.25, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


def functions(function: Callable[..., torch.Tensor], lab: Lab) -> tuple[nn.ModuleList, torch.Tensor]:
    return build(lambda: Function(function), LAYERS, lab.device)


def assert_bits(
    step: Callable[[], list[torch.Tensor]],
    layers: Any,
    lab: Lab,
    policies: dict[str, str] = ALL,
    num_layers: int = 0,
    times: int = 3,
) -> Any:
    """Several steps with policies give the bits of one without; returns the first layer's regions."""
    expected = step()
    with offloaded(layers, lab, policies, num_layers) as handle:
        for _ in range(times):
            assert_same(expected, step())
        return handle.regions(0)


def assert_right(
    function: Callable[..., torch.Tensor], lab: Lab, policies: dict[str, str] = ALL, num_layers: int = 0
) -> Any:
    """The same of layers of one function, while copies come late and memory that is let go holds garbage."""
    layers, x = functions(function, lab)
    lab.adverse()
    return assert_bits(partial(step_gradients, layers, x), layers, lab, policies, num_layers)


@pytest.mark.parametrize(
    ("block", "policies", "num_layers"),
    [
        pytest.param(block, policies, 2 * ((one + other) % 2), id=f"{block}-{name}")
        for one, block in enumerate(BLOCKS)
        for other, (name, policies) in enumerate(POLICIES.items())
    ],
)
def test_gradients_are_the_same_bits(block: str, policies: dict[str, str], num_layers: int, lab: Lab) -> None:
    layers, x = build(block, LAYERS, lab.device)
    expected = step_gradients(layers, x)
    lab.adverse()
    with offloaded(layers, lab, policies, num_layers) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        assert "recompute" in handle.regions(0).values()
        assert (handle.stats().offloaded_bytes > 0) == (num_layers > 0)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_parameter_that_is_cast_makes_nothing_run_again(autocast: bool, lab: Lab) -> None:
    """The copy of the parameter is known, whoever has cast it: what comes before in the layer can be skipped."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        with torch.autocast(lab.device.type, torch.bfloat16, enabled=autocast):
            return (y @ (w if autocast else w.bfloat16().float())).sin().cos().float()

    layers, x = functions(function, lab)
    expected = step_gradients(layers, x)
    with offloaded(layers, lab, {"exp": "keep", "mm": "keep", "*": "recompute"}):
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        found = count_in_backward(layers, x)
    assert (found["exp"], found["mm"]) == (0, 2 * LAYERS)
    assert found["sin"] > LAYERS


def test_an_input_that_autocast_casts_several_times_can_be_recomputed(lab: Lab) -> None:
    """As in BERT, whose layers begin with three products. Of a leaf, autocast would hold what it has cast."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(lab.device.type, torch.bfloat16):
            return ((x @ w) * (x @ w.sin())).tanh().float()

    layers, x = functions(function, lab)
    expected = step_gradients(layers, x)
    with offload.offload_layers(layers, memory_budget="1GiB", device=lab.device, min_bytes=0) as handle:
        for _ in range(3):
            assert_same(expected, step_gradients(layers, x))
        assert handle.state == "following"


def _part_doubled(y: torch.Tensor) -> torch.Tensor:
    y[..., : WIDTH // 2].mul_(2)
    return y


def _overwritten_after_reading(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = (y * 3).tanh()  # saves its result, which is computed from what y held
    y.add_(1)
    return z * y.sigmoid()


def _into_a_list(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = [x @ w, x * 2]
    torch._foreach_mul_(made, 3)
    return made[0].tanh() * made[1].sigmoid()


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "over what was just made": lambda x, w: (x @ w).mul_(2).add_(x).relu_() * x,
    "over a part": lambda x, w: _part_doubled(x @ w).tanh() * x,
    "over what was read before": _overwritten_after_reading,
    "into new memory": lambda x, w: torch.empty_like(x).copy_(x @ w).sigmoid_() * x,
    "out of place into an argument": _into_a_list,
}


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=list(IN_PLACE))
def test_writing_in_place(function: Callable[..., torch.Tensor], lab: Lab) -> None:
    assert "recompute" in assert_right(function, lab).values()


def test_a_result_of_the_layer_that_is_changed_before_backward(lab: Lab) -> None:
    """A product that autograd does not save: what is computed from it was kept, or is recomputed as it was."""
    layers, x = functions(lambda x, w: [y := x @ w, (y * 3).tanh()], lab)

    def step(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        def run() -> None:
            product, z = layers[0](x)
            loss_of(change(product) + z).backward()

        return gradients([x, layers[0].weight], run)

    for policies in ({"mm": "keep", "*": "recompute"}, ALL):
        assert_bits(lambda: step(lambda product: product.add_(1)), layers, lab, policies)


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_steps_that_learn_and_prove_offload_no_more_than_those_that_follow(policies: dict[str, str], lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    with offloaded(layers, lab, policies, LAYERS - 2) as handle:
        amounts = []
        for _ in range(4):
            before = handle.stats()
            step_gradients(layers, x)
            amounts.append((handle.stats() - before).offloaded_bytes)
        assert 0 < amounts[-1] == max(amounts), amounts


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_what_travels_frees_its_memory_in_every_step(policies: dict[str, str], lab: Lab) -> None:
    """The copies that begin while a layer runs are not taken for operations of the layer."""
    layers, x = build("decoder", LAYERS, lab.device)
    with offloaded(layers, lab, policies, LAYERS - 2) as handle:
        for _ in range(3):
            y = (x + 1).detach_()  # nobody else holds the first layer's input
            for layer in layers:
                y = layer(y)
            loss_of(y).backward()
            del y
        assert handle.stats().offloaded_bytes > 0
        assert not handle.stats().wasted


def count_in_backward(layers: nn.ModuleList, x: torch.Tensor) -> Counter[str]:
    loss = loss_of(through(layers, x))
    with Seen() as seen:
        loss.backward()
    return seen.times


def test_only_what_backward_needs_is_computed_again(lab: Lab) -> None:
    """Not the last product, whose result nobody saves; nor products that are kept, saved by autograd or not."""
    layers, x = build("decoder", LAYERS, lab.device)
    without = count_in_backward(layers, x)
    with offloaded(layers, lab) as handle:
        step_gradients(layers, x)
        everything = count_in_backward(layers, x)
        assert handle.regions(0)["down: mm"] == "recompute"
    assert everything["mm"] - without["mm"] == 4 * LAYERS  # qkv, out, gate and up; not down
    with offloaded(layers, lab, {"*mm": "keep", "*": "recompute"}):
        step_gradients(layers, x)
        assert count_in_backward(layers, x)["mm"] == without["mm"]
        assert count_in_backward(layers, x)["silu"] == LAYERS


@pytest.mark.usefixtures("no_room")
def test_where_memory_is_short_nothing_more_is_held_to_compare_second_runs(lab: Lab) -> None:
    """What all operations compute in backward is compared with what some of them compute from what was kept."""
    layers, x = build("decoder", LAYERS, lab.device)

    def held_bytes() -> int:
        with offload.memory_meter(lab.device) as meter:
            loss = loss_of(through(layers, x))
        loss.backward()
        return meter.peak_bytes

    with offloaded(layers, lab, {"*mm": "keep", "*": "recompute"}):
        step_gradients(layers, x)
        first_bytes = held_bytes()
        assert held_bytes() == first_bytes


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("block", ["decoder", "gpt", "encoder"])
def test_where_memory_is_short_comparing_second_runs_needs_no_more_than_the_steps_that_follow(
    block: str, lab: Lab
) -> None:
    """What one run was handed over, and has computed, is on the host beside the other one, which holds nothing."""
    layers, _ = build(block, LAYERS, lab.device)
    x = torch.rand(8, 64, WIDTH, device=lab.device, requires_grad=True)
    expected = step_gradients(layers, x)
    with offloaded(layers, lab, {"*mm": "keep", "*": "recompute"}, max_host_bytes=4096):
        assert_same(expected, step_gradients(layers, x))
        peaks = []
        for _ in range(2):
            layers.zero_grad()
            with offload.memory_meter(lab.device) as meter:
                assert_same(expected, step_gradients(layers, x))
            peaks.append(meter.peak_bytes)
    assert peaks[0] <= peaks[1]


@pytest.mark.usefixtures("no_room")
def test_the_pool_lends_what_it_may_where_that_is_not_enough(lab: Lab) -> None:
    """To compare a second run. Copies in ordinary memory alone would take seconds for each layer."""
    layers, _ = build("decoder", LAYERS, lab.device)
    x = torch.rand(8, 64, WIDTH, device=lab.device, requires_grad=True)
    expected, most = step_gradients(layers, x), 2 * x.nbytes
    with offloaded(layers, lab, max_host_bytes=most) as handle:
        assert_same(expected, step_gradients(layers, x))
        assert x.nbytes <= handle.stats().pinned_bytes <= most
        lab.drain()
        assert lab.pool.used_bytes == 0


@pytest.mark.usefixtures("nothing_recomputed")
def test_no_more_is_moved_to_the_host_than_leaves_room() -> None:
    """All memory of what is moved: two tensors may be views of one storage."""
    policies = LayerPolicies({"*": "recompute"}, nn.Linear(1, 1))
    policies.is_short = lambda nbytes: nbytes > 250
    tensors = [torch.empty(25) for _ in range(4)]  # of 100 bytes
    moved = policies.in_the_way([*tensors, tensors[0].view(5, 5)], 400)
    assert [one.data_ptr() for one in moved] == [tensors[number].data_ptr() for number in (0, 1, 0)]
    assert policies.in_the_way(tensors, 250) == []


@pytest.mark.parametrize("room", ["no_room", "little_room"])
def test_where_memory_is_short_second_runs_are_compared_in_backward(
    room: str, lab: Lab, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(room)
    layers, x = build("decoder", LAYERS, lab.device)
    without = count_in_backward(layers, x)["mm"]
    with offloaded(layers, lab, {"*mm": "keep", "*": "recompute"}, max_host_bytes=4096):
        step_gradients(layers, x)
        assert count_in_backward(layers, x)["mm"] == without + 5 * LAYERS
        assert count_in_backward(layers, x)["mm"] == without
    if room == "little_room" and lab.device.type == "cpu":  # whose budget has no byte to spare for that in backward
        with offloaded(layers, lab, {"*mm": "keep", "*": "recompute"}):
            step_gradients(layers, x)
            assert count_in_backward(layers, x)["mm"] == without


def test_patterns_that_match_no_region_are_named_once(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    with offloaded(layers, lab, {"*mlp*": "keep", "silu": "keep", "up_proj: mm": "offload", "*": "recompute"}):
        with pytest.warns(UserWarning, match=r"match no region: '\*mlp\*', 'up_proj: mm'\. .*'up: mm'") as told:
            step_gradients(layers, x)
        assert len(told) == 1
        step_gradients(layers, x)
    with offloaded(layers, lab, {"input": "offload", "*": "recompute"}):
        step_gradients(layers, x)
    with offloaded(layers, lab, {"*mlp*": "keep"}):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"match no region: '\*mlp\*'\. .*'up: mm'"):
                step_gradients(layers, x)


@pytest.mark.filterwarnings("ignore:a whole round of")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.usefixtures("nothing_recomputed")
def test_what_is_kept_does_not_travel(block: str, lab: Lab) -> None:
    """Also what one operation saves several times: attention saves three views of one product."""
    layers, x = build(block, LAYERS, lab.device)
    with offloaded(layers, lab, {"*": "keep"}, 2) as handle:
        for _ in range(3):
            step_gradients(layers, x)
        assert handle.stats().offloaded_bytes == 0


def test_patterns_may_name_modules(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    with offloaded(layers, lab, {"norm?: *": "recompute", "gate: mm": "offload"}, 2) as handle:
        step_gradients(layers, x)
        regions = handle.regions(3)
    assert regions["gate: mm"] == "offload"
    assert regions["up: mm"] == "keep"
    assert {policy for name, policy in regions.items() if name.startswith("norm")} == {"recompute"}


def test_second_derivative(lab: Lab) -> None:
    layers, x = functions(lambda x, w: (x @ w).tanh() * x.sigmoid(), lab)

    def second() -> list[torch.Tensor]:
        y = through(layers, x)
        (first,) = torch.autograd.grad(loss_of(y), x, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.square().sum(), list(layers.parameters()))]

    lab.adverse()
    assert_bits(second, layers, lab)


def test_inference_tensors(lab: Lab) -> None:
    """They do not tell whether they were changed: what is computed from them is kept."""
    with torch.inference_mode():
        mask = torch.empty(WIDTH, device=lab.device)
    layers, x = functions(lambda x, w: ((x @ w).sin() + mask).tanh() * x, lab)

    def step() -> None:
        with torch.inference_mode():
            mask.fill_(0.5)
        y = through(layers, x)
        with torch.inference_mode():
            mask.fill_(7)
        loss_of(y).backward()

    for policies in (ALL, {"add": "keep", "*": "recompute"}):
        assert_bits(lambda: gradients(leaves_of(layers, x), step), layers, lab, policies)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("native_batch_norm", ["running_mean", "running_var"]),
        ("batch_norm_gather_stats_with_counts", ["running_mean", "running_var"]),
        ("batch_norm_update_stats", ["running_mean", "running_var"]),
        ("_cudnn_rnn", ["dropout_state"]),
    ],
)
@pytest.mark.usefixtures("nothing_recomputed")
def test_operations_that_write_more_than_they_say(name: str, written: list[str]) -> None:
    """Synchronized batch norm, for one: running it twice would count the batch twice."""
    operation = getattr(torch.ops.aten, name).default
    known = known_operation(operation)
    assert not known.is_view
    assert [operation._schema.arguments[place].name for place in known.written] == written


def test_parts_of_one_storage_that_change_by_themselves(lab: Lab, unplanned: set[str]) -> None:
    """A part that is saved later looks into the storage that was saved, and copied, before another part changed."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = (x @ w).unsafe_chunk(4, -1)
        first = parts[0] * parts[2]
        parts[1].mul_(2)
        changed = (parts[1] * 3).tanh()
        return torch.cat([first.sin(), parts[3] * parts[0], changed.sigmoid(), first], -1).sin() * x

    unplanned.add("comes out with other bits")  # the product, which is changed after it was saved
    assert assert_right(function, lab, {"mm": "offload", "*": "recompute"}, 2)["tanh"] == "recompute"


def test_beside_other_checkpointing(lab: Lab) -> None:
    """A layer that is checkpointed as a whole saves nothing to treat; one inside of which something is, does."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.utils.checkpoint.checkpoint(lambda x: (x @ w).tanh() * x, x, use_reentrant=False)
        return y.sigmoid() * x

    assert_right(function, lab)


def test_streamed_weights(lab: Lab) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    expected = [tensor.cpu() for tensor in step_gradients(layers, x)]
    with offload.stream_weights(layers, lab.device), offloaded(layers, lab, PRODUCTS, 2):
        lab.adverse()
        for _ in range(3):
            assert_same(expected, [tensor.cpu() for tensor in step_gradients(layers, x)])


@pytest.mark.parametrize(
    ("policies", "error", "words"),
    [
        ({"*": "forget"}, ValueError, "must be one of 'keep', 'offload', 'recompute'"),
        ("recompute", TypeError, "must map patterns of regions to policies"),
        ({1: "keep"}, TypeError, "must map patterns of regions to policies"),
    ],
)
@pytest.mark.usefixtures("nothing_recomputed")
def test_bad_policies(policies: Any, error: type[Exception], words: str) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    with pytest.raises(error, match=words):
        offload.offload_layers(layers, 0, policies=policies)


MORE = 5
SCHEDULES = {
    "default": offload.Schedule.default(3, MORE),
    "released in forward, back in backward": offload.Schedule.from_synchronization_dict(
        {0: (True, 2, False, 2), 1: (True, 4, False, 3)}, MORE
    ),
    "released in backward": offload.Schedule.from_synchronization_dict(
        {1: (False, 4, False, 2), 2: (True, 4, False, 3)}, MORE
    ),
    "back before the last forward": offload.Schedule.from_synchronization_dict({1: (True, 3, True, 4)}, MORE),
}
SCHEDULED = {
    "products offloaded": {"*mm": "offload", "*": "recompute"},
    "products kept": {"*mm": "keep", "*": "recompute"},
    "some": {"*norm*": "recompute", "gelu": "recompute", "*softmax": "recompute", "*": "offload"},
}
ORDERS = ["F0 B0 F1 B1", "F0 F1 B0 F2 B1 B2", "F0 F1 F2 B1 B0 B2"]
PAIRS = [
    (schedule, list(SCHEDULED)[(i + j) % len(SCHEDULED)], order)
    for i, schedule in enumerate(SCHEDULES)
    for j, order in enumerate(ORDERS)
]


@pytest.mark.drawn(6)
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "policies", "order"), PAIRS)
def test_gradients(schedule: str, policies: str, order: str, lab: Lab) -> None:
    layers, x = build("gpt", MORE, lab.device)
    actions = order.split()
    inputs = [x.detach().roll(i, 1).requires_grad_() for i in range(len(actions) // 2)]

    def step() -> None:
        losses: dict[str, torch.Tensor] = {}
        for phase, number in actions:
            if phase == "F":
                y = through(layers, inputs[int(number)])
                losses[number] = loss_of(y)
            else:
                losses.pop(number).backward()

    leaves = leaves_of(layers, *inputs)
    expected = gradients(leaves, step)
    lab.adverse()
    plan = {"schedule": SCHEDULES[schedule], "policies": SCHEDULED[policies]}
    with offload.offload_layers(layers, min_bytes=1, device=lab.device, **plan) as handle:
        for _ in range(3):
            assert_same(expected, gradients(leaves, step))
        assert handle.stats().reloaded_bytes > 0
        assert not handle.stats().late_reloads
        assert "recompute" in handle.regions(MORE - 1).values()


@pytest.fixture
def captures(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Begins the capture when it is told to."""
    if lab.device.type != "cpu":
        pytest.skip("test_graph_policies.py captures graphs")
    return monkeypatch


def begin(captures: pytest.MonkeyPatch, lab: Lab) -> None:
    captures.setattr(type(lab.backend), "capturing", True)
    captures.setattr(torch.cuda, "is_available", lambda: True)
    captures.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_capture_without_warm_up_is_refused(lab: Lab, captures: pytest.MonkeyPatch) -> None:
    layers, x = build("decoder", LAYERS, lab.device)
    with offloaded(layers, lab):
        with captures.context() as capture:
            begin(capture, lab)
            with pytest.raises(offload.CaptureError, match="warm up with two steps before the capture"):
                layers[0](x)
        expected = step_gradients(build("decoder", LAYERS, lab.device)[0], x)
        assert_same(expected, step_gradients(layers, x))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_random_numbers_are_drawn_once(compiled: bool, lab: Lab, captures: pytest.MonkeyPatch) -> None:
    """What draws them is kept, and what is computed from it recomputed; a compiled layer is kept as a whole."""
    layers, x = build("gpt", LAYERS, lab.device)
    if compiled:
        for layer in layers:
            layer.compile(backend="aot_eager")
    expected = step_gradients(layers, x)
    with offloaded(layers, lab, num_layers=2) as handle:
        for _ in range(2):
            before = handle.stats()
            assert_same(expected, step_gradients(layers, x))
        warm_up = handle.stats() - before
        begin(captures, lab)
        before = handle.stats()
        assert_same(expected, step_gradients(layers, x))
        captured = handle.stats() - before
        assert captured.offloaded_bytes <= warm_up.offloaded_bytes  # no more host memory than the warm-up has pinned
        y = through(layers, x)
        with Seen() as seen:
            loss_of(y).backward()
        assert not seen.times["bernoulli_"]
        assert compiled or seen.times["gelu"] == LAYERS


def test_what_draws_for_nothing_is_not_run_again_in_a_capture(lab: Lab, captures: pytest.MonkeyPatch) -> None:
    """Nobody could put the generator back there. Elsewhere the whole layer runs again."""
    layers, x = build(lambda: Function(_draws_for_nothing), LAYERS, lab.device)
    expected = step_gradients(layers, x)
    with offloaded(layers, lab):
        for _ in range(2):
            assert_same(expected, step_gradients(layers, x))
        begin(captures, lab)
        assert_same(expected, step_gradients(layers, x))
        y = through(layers, x)
        with Seen() as seen:
            loss_of(y).backward()
        assert seen.times["sin"] == LAYERS
        assert not seen.times["rand_like"]


def _draws_for_nothing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    torch.rand_like(x)
    return x.sin().tanh() * w.mean()
