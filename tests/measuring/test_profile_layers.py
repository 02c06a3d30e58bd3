"""Profiles of real models: times of the right layer, and the bytes that really are offloaded."""

import statistics
import time
from contextlib import nullcontext

import pytest
import torch
from models import Composed, through
from torch import Tensor, nn

from benchmarks.workloads import DecoderBlock
from offload import memory_meter, offload_layers, stream_weights
from offload.measuring.measure_link import measure_link
from offload.measuring.profile_layers import profile_layers
from offload.planning.plan import Plan
from offload.planning.simulate import simulate
from offload.recompute.costs import LayerPolicy
from offload.schedule.schedule import Schedule

MIN_BYTES = 1 << 10


class Clock:
    """The time that the profile reads; it passes where a test says so, however busy the machine is."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("offload.device.cpu.time", clock)
    return clock


class Wait(torch.autograd.Function):
    """Takes known times, and saves nothing."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        clock.sleep(forward_s)
        ctx.wait = (clock, backward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        clock, backward_s = ctx.wait
        clock.sleep(backward_s)
        return gradient, None, None, None


def slow(clock: Clock, forward_s: float, backward_s: float) -> nn.Module:
    return Composed(
        lambda own, x: Wait.apply(x * own.scale, clock, forward_s, backward_s) * own.scale,
        scale=nn.Parameter(torch.ones(())),
    )


class Block(nn.Module):
    """Saves permuted views, an input of another layer, and views of parameters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


def stack(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def training_step(model: nn.Module, x: Tensor):
    return lambda: model(x).square().mean().backward()


class TestTimes:
    @pytest.mark.parametrize(("input_needs_grad", "regions"), [(False, False), (True, False), (True, True)])
    def test_of_the_right_layer(self, clock, input_needs_grad, regions):
        model = nn.Sequential(slow(clock, 0.01, 0.04), slow(clock, 0.02, 0.03))
        x = torch.ones(1024, requires_grad=input_needs_grad)

        def step():
            y = model(x)
            clock.sleep(0.015)
            y.sum().backward()
            clock.sleep(0.025)

        profile = profile_layers(model, step, min_bytes=MIN_BYTES, regions=regions)
        times = [time_s for layer in profile.layers for time_s in (layer.forward_s, layer.backward_s)]
        assert times == pytest.approx([0.01, 0.04, 0.02, 0.03])
        assert (profile.loss_s, profile.other_s) == pytest.approx((0.015, 0.025))

    def test_of_one_microbatch(self, clock):
        model = nn.Sequential(slow(clock, 0.01, 0.01), slow(clock, 0.01, 0.01))
        x = torch.ones(1024)

        def step():
            for _ in range(3):
                model(x).sum().backward()

        profile = profile_layers(model, step, min_bytes=MIN_BYTES, steps=2)
        assert profile.compute_s == pytest.approx(0.04)


class TestBytes:
    def test_are_those_that_are_offloaded(self):
        model, x = stack(), torch.randn(2, 32, 64)
        step = training_step(model, x)
        profile = profile_layers(model, step, min_bytes=MIN_BYTES, device="cpu", steps=1)
        for num_layers in (1, 2, 3):
            with pytest.warns(UserWarning, match="overlap") if num_layers == 3 else nullcontext():
                handle = offload_layers(model, num_layers, min_bytes=MIN_BYTES, device="cpu")
            with handle:
                step()
            expected = sum(layer.saved_bytes for layer in profile.layers[:num_layers])
            assert handle.stats().reloaded_bytes == expected

    def test_of_each_tensor_in_the_order_of_saving(self):
        def saves(_, x):
            a = x.exp()  # saves its result
            return a[:512].square().sum() + a.sin().cos().sum()  # saves a view of it, it again, and sin's

        (layer,) = profile_layers(
            [module := Composed(saves)],
            lambda: module(torch.ones(1024, requires_grad=True)).backward(),
            min_bytes=MIN_BYTES,
            steps=1,
        ).layers
        assert layer.tensors == (4096, 4096)
        assert layer.saved_bytes == 8192

    def test_parameters_and_small_tensors_do_not_count(self):
        linear = nn.Linear(64, 64)
        x = torch.randn(32, 64)
        step = training_step(linear, x)
        (layer,) = profile_layers([linear], step, min_bytes=MIN_BYTES, steps=1).layers
        assert layer.tensors == (32 * 64 * 4,)
        with pytest.raises(ValueError, match=r"^no layer saved at least min_bytes = 8193 bytes at once on cpu; lower "):
            profile_layers([linear], step, min_bytes=32 * 64 * 4 + 1, steps=1)

    def test_a_storage_that_two_layers_save_counts_in_the_later_one(self):
        model = nn.Sequential(Composed(lambda _, x: x.exp()), Composed(lambda _, x: x.square()))
        step = training_step(model, torch.ones(1024, requires_grad=True))
        profile = profile_layers(model, step, min_bytes=MIN_BYTES, steps=1)
        assert [layer.tensors for layer in profile.layers] == [(), (4096,)]


@pytest.mark.gpu
@pytest.mark.alone
def test_prediction_agrees_with_what_the_gpu_does():
    torch.manual_seed(0)
    layers = nn.ModuleList(DecoderBlock(2048, 5632, 16) for _ in range(12)).to("cuda", torch.bfloat16)
    x = torch.randn(8, 2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        y = through(layers, x)
        y.sum().backward()  # What the loss itself needs is outside of the layers, and of the prediction.

    def timed_s() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    profile, link = profile_layers(layers, step), measure_link()
    for num_layers in (0, 4, 9):
        predicted = simulate(Schedule.default(num_layers, 12), profile, link)
        with offload_layers(layers, num_layers):
            for _ in range(3):
                step()
            measured_s = statistics.median(timed_s() for _ in range(7))
            with memory_meter() as meter:
                step()
        assert predicted.duration_s == pytest.approx(measured_s, rel=0.15)
        assert predicted.peak_bytes == pytest.approx(meter.peak_bytes, rel=0.15)


class TestLeavesTheModelAlone:
    def test_gradients_are_those_of_plain_steps(self):
        x = torch.randn(2, 32, 64)
        plain, profiled = stack(), stack()
        step = training_step(plain, x)
        for _ in range(4):
            step()
        profile_layers(profiled, training_step(profiled, x), min_bytes=MIN_BYTES, steps=2)
        for a, b in zip(plain.parameters(), profiled.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)

    def test_hooks_are_gone_even_after_an_error(self):
        model, x = stack(2), torch.randn(2, 32, 64, requires_grad=True)

        def step():
            model(x)
            raise RuntimeError("out of luck")

        with pytest.raises(RuntimeError, match="out of luck"):
            profile_layers(model, step)
        for module in model:
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        assert not x._backward_hooks
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

    def test_evaluation_within_the_step_does_not_count(self):
        model, x = stack(2), torch.randn(2, 32, 64)

        def step():
            with torch.no_grad():
                model(x)
            training_step(model, x)()

        assert profile_layers(model, step, min_bytes=MIN_BYTES, steps=1).saved_bytes > 0


def test_layers_with_streamed_weights_whose_first_input_needs_no_gradient(device):
    model = stack(3).to(device)
    x = torch.randn(2, 32, 64, device=device)
    with stream_weights(model, device):
        found = profile_layers(model, training_step(model, x), min_bytes=MIN_BYTES, device=device, steps=2)
    assert min(layer.backward_s for layer in found.layers) > 0


class TestRefusals:
    @pytest.mark.parametrize("regions", [False, True])
    def test_layer_that_is_not_called(self, regions):
        model = stack(2)
        step = training_step(model, torch.randn(2, 32, 64))
        with pytest.raises(ValueError, match=r"^layer 2 must run forward and backward in step\(\), but its forward "):
            profile_layers([*model, Block()], step, min_bytes=MIN_BYTES, regions=regions)

    @pytest.mark.parametrize("regions", [False, True])
    def test_nothing_that_can_be_offloaded(self, regions):
        step = training_step(model := stack(2), torch.randn(2, 32, 64))
        with pytest.raises(ValueError, match=r"^no layer saved at least min_bytes = 1073741824 bytes at once on cpu; "):
            profile_layers(model, step, min_bytes="1GiB", regions=regions)

    def test_step_without_backward(self):
        model = stack(2)
        x = torch.randn(2, 32, 64)
        with pytest.raises(
            ValueError, match=r"^layer 0 must run .*, but its backward did not; .* call backward\(\)\.$"
        ):
            profile_layers(model, lambda: model(x), min_bytes=MIN_BYTES)

    def test_no_layers(self):
        with pytest.raises(ValueError, match=r"^layers must hold at least one module, got none$"):
            profile_layers([], lambda: None)

    def test_no_steps(self):
        with pytest.raises(ValueError, match=r"^steps must be at least 1, got 0$"):
            profile_layers(stack(1), lambda: None, steps=0)


@pytest.mark.gpu
def test_plans_count_that_a_layer_which_is_recomputed_as_a_whole_frees_sooner_what_is_summed() -> None:
    """The gradient of a bias is a sum, for which CUDA takes more memory than a layer's input has."""
    layers = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(1152), nn.Linear(1152, 4608), nn.GELU(), nn.Linear(4608, 1152)) for _ in range(5)
    ).to("cuda", torch.bfloat16)
    x = torch.randn(16384, 1152, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        through(layers, x).float().square().mean().backward()

    step()
    profile = profile_layers(layers, step, regions=True)
    gelu = next(number for number, one in enumerate(profile.layers[0].regions) if "gelu" in one.name)
    for kept, more in (frozenset({0}), 0.02), (frozenset({0, gelu}), 0.15):  # of the rest, some is freed sooner, too
        plan = Plan(Schedule(5), profile, measure_link("cuda"), 0, (LayerPolicy(kept),) * 5)
        with offload_layers(layers, plan=plan):
            step()
            step()
            with memory_meter("cuda") as meter:
                step()
        assert (1 - more) * plan.peak_bytes <= meter.peak_bytes <= 1.02 * plan.peak_bytes
