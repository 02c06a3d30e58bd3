"""An MLP in tiles is the whole MLP: in float64 to 1e-12, and only sums over tokens round in another order."""

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from llama import LAYERS, enable_checkpointing, llama
from models import Composed, GptBlock
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

import offload
from offload import tile_mlp

transformers = pytest.importorskip("transformers")

TOKENS = 24


def model_and_step(dtype: torch.dtype = torch.float64) -> tuple[Any, Callable[[], torch.Tensor]]:
    model = llama(transformers, torch.device("cpu")).to(dtype)
    tokens = torch.randint(64, (2, TOKENS // 2))

    def step() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return model, step


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].cpu(), gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation(mode: Callable[[], Any]) -> None:
    layer, x = Layer(), torch.randn(2, 64, 8, requires_grad=True)
    with mode():
        expected = layer(x)
        with tile_mlp([layer], 16):
            torch.testing.assert_close(layer(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "checkpointing"), [(1, True), (5, None), (8, False), (23, None), (23, True)])
def test_tiles_give_the_gradients_of_the_whole(tokens: int, checkpointing: bool | None) -> None:
    model, step = model_and_step()
    expected_loss, expected = step(), gradients(model)
    if checkpointing is not None:
        enable_checkpointing(model, reentrant=checkpointing)
    with tile_mlp(model.model.layers, tokens):
        loss = step()
        close(gradients(model), expected)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("tokens", "sizes"), [(5, [6, 6, 4, 4, 4]), (23, [12, 12]), (24, [24])])
def test_no_tile_is_much_larger_than_asked(tokens: int, sizes: list[int]) -> None:
    """A tile has the same tokens of each sequence."""
    seen: list[int] = []

    def see(own: Any, x: torch.Tensor) -> Any:
        seen.append(x.shape[:-1].numel())
        return own.inner(x)

    layer = nn.Module()
    layer.mlp = Composed(see, inner=nn.Linear(8, 8))
    with tile_mlp([layer], tokens):
        layer.mlp(torch.rand(2, 12, 8))
    assert seen == sizes


def test_a_tile_that_holds_all_changes_no_bit() -> None:
    model, step = model_and_step(torch.float32)
    step()
    expected = gradients(model)
    with tile_mlp(model.model.layers, TOKENS):
        step()
    found = gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def rows_of(model: Any, step: Callable[[], object]) -> list[int]:
    """The tokens that each call of the MLPs' activation function sees in a step."""
    rows: list[int] = []
    hooks = [
        layer.mlp.act_fn.register_forward_pre_hook(lambda _, args: rows.append(args[0][..., 0].numel()))
        for layer in model.model.layers
    ]
    step()
    for hook in hooks:
        hook.remove()
    return rows


def test_nothing_between_is_longer_than_a_tile() -> None:
    model, step = model_and_step()
    assert rows_of(model, step) == [TOKENS] * LAYERS
    with tile_mlp(model.model.layers, 8):
        assert rows_of(model, step) == [8] * 3 * LAYERS * 2  # three tiles, forward and once more
        enable_checkpointing(model, reentrant=False)
        assert rows_of(model, step) == [8] * 3 * LAYERS * 2  # and no third time


def test_the_input_is_saved_and_nothing_between() -> None:
    model, _ = model_and_step()
    x = torch.rand(1, TOKENS, 32, dtype=torch.float64)
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.data_ptr())
        return tensor.detach()

    mlp = model.model.layers[0].mlp
    with tile_mlp(model.model.layers, 8), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = mlp(x)
    assert saved == [x.data_ptr(), *(parameter.data_ptr() for parameter in mlp.parameters())]
    y.sum().backward()


def test_the_input_goes_when_its_backward_has_run() -> None:
    layer = nn.Module()
    layer.mlp = Composed(lambda _, x: x * x)
    x = torch.rand(12, 3, requires_grad=True)
    with tile_mlp([layer], 4):
        y = x * 2
        storage = y.untyped_storage()._weak_ref()  # type: ignore[attr-defined]  # private, here and below
        z = layer.mlp(y)
        del y
    for _ in range(2):  # the graph is kept, and so is the input
        x.grad = None
        z.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, 8 * x)
    assert not torch.UntypedStorage._expired(storage)
    z.sum().backward()
    assert torch.UntypedStorage._expired(storage)
    assert z.grad_fn is not None


def test_sums_are_in_float32_and_the_output_may_be_changed() -> None:
    """In bfloat16, 400 tiles would lose most of what the last ones add."""
    torch.manual_seed(0)
    layer = nn.Module()
    layer.mlp = nn.Linear(3, 3).bfloat16()
    x = torch.rand(400, 3).bfloat16()
    with tile_mlp([layer], 1):
        layer.mlp(x).mul_(2).sum().backward()
    exact = 2 * x.double().sum(0)
    assert layer.mlp.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(layer.mlp.weight.grad.double(), exact.expand(3, 3), rtol=2**-8, atol=0.0)


WAYS: dict[str, Callable[[Any], Any]] = {
    "offloaded": lambda layers: offload.offload_layers(layers, LAYERS - 2, min_bytes=1),
    "regions": lambda layers: offload.offload_layers(
        layers, LAYERS - 2, min_bytes=1, policies={"*attention*": "offload", "*": "recompute"}
    ),
    "recomputed": lambda layers: offload.offload_layers(layers, 0, min_bytes=1, policies={"*": "recompute"}),
    "budget": lambda layers: offload.offload_layers(layers, min_bytes=1, memory_budget="640KiB"),
    "streamed": partial(offload.stream_weights, device="cpu"),
}


@pytest.mark.drawn(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "checkpointing", "first"),
    [
        (["offloaded"], True, False),
        (["regions"], False, True),
        (["regions"], True, False),
        (["recomputed"], False, False),
        (["recomputed"], True, True),
        (["budget"], True, True),
        (["budget"], False, False),
        (["streamed"], False, True),
        (["streamed", "offloaded"], False, False),
        (["streamed", "regions"], True, True),
    ],
)
def test_together_with_what_moves(ways: list[str], checkpointing: bool, first: bool) -> None:
    model, step = model_and_step()
    step()
    whole = gradients(model)
    with tile_mlp(model.model.layers, 8):
        step()
    expected = gradients(model)
    if checkpointing:
        enable_checkpointing(model, reentrant=False)
    with ExitStack() as stack:
        if first:
            stack.enter_context(tile_mlp(model.model.layers, 8))
        for way in ways:
            stack.enter_context(WAYS[way](model.model.layers))
        if not first:
            stack.enter_context(tile_mlp(model.model.layers, 8))
        for _ in range(4):
            step()
        found = gradients(model)
    close(found, whole)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_copies_are_their_own_and_remove_puts_all_back() -> None:
    model, step = model_and_step()
    names = [set(vars(layer.mlp)) for layer in model.model.layers]
    keys = model.state_dict().keys()
    handle = tile_mlp(model.model.layers, 8)
    assert model.state_dict().keys() == keys
    x = torch.rand(1, TOKENS, 32, dtype=torch.float64)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mlp = other.model.layers[0].mlp
        nn.init.zeros_(mlp.down_proj.weight)
        assert not mlp(x).any()
    assert model.model.layers[0].mlp(x).any()
    handle.remove()
    handle.remove()
    assert [set(vars(layer.mlp)) for layer in model.model.layers] == names
    step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiled_layers() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(GptBlock(dropout=0.0) for _ in range(2)).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True)

    def step() -> dict[str, torch.Tensor]:
        layers.zero_grad()
        y = x
        for layer in layers:
            y = layer(y)
        y.square().sum().backward()
        return gradients(layers)

    expected = step()
    rows: list[int] = []
    for layer in layers:
        layer.mlp[1].register_forward_pre_hook(lambda _, args: rows.append(args[0][..., 0].numel()))
        layer.compile(backend="aot_eager")
    close(step(), expected)
    assert rows == [24, 24]
    rows.clear()
    with tile_mlp(layers, 8):
        close(step(), expected)
    assert rows == [8] * 3 * 2 * 2  # tiles, layers, forward and backward
    rows.clear()
    close(step(), expected)
    assert rows == [24, 24]


def test_anothers_forward_is_tiled_and_comes_back() -> None:
    layer = nn.Module()
    layer.mlp = nn.Linear(3, 3)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return x + len(x)

    layer.mlp.forward = theirs
    with tile_mlp([layer], 4):
        assert torch.equal(layer.mlp(torch.zeros(8, 1)), torch.full((8, 1), 4.0))
    assert layer.mlp.forward is theirs


def test_what_does_not_fit_is_refused() -> None:
    model, _ = model_and_step()
    with pytest.raises(ValueError, match=r"layer 0 must have a module 'mlp', got None; give its name as mlp=…"):
        tile_mlp([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        tile_mlp(model.model.layers, 0)
    layer = nn.Module()
    two = torch.rand(8, 3), (torch.rand(1, 3), torch.rand(1, 3))
    for layer.mlp, given, said in (
        (nn.LSTM(3, 3), two[:1], r"'mlp' of layer 0 \(LSTM\) .* must return one tensor .*, got a tuple"),
        (nn.LSTM(3, 3), two, "it must be called with one tensor, got a Tensor, a tuple"),
        (nn.Flatten(), (torch.rand(1, 8, 3),), r"its input's tokens \(1, 4\), got the shape \(1, 12\)"),
    ):
        with tile_mlp([layer], 4), pytest.raises(TypeError, match=said):
            layer.mlp(*given)
    with pytest.raises(TypeError, match=r"layers must be a list of modules, such as model\.layers, got None"):
        tile_mlp(None)  # type: ignore[arg-type]  # wrong on purpose
    with tile_mlp(model.model.layers), pytest.raises(ValueError, match="'mlp' of layer 0 is tiled already"):
        tile_mlp(model.model.layers)


class Layer(nn.Module):
    """An MLP between two layers, so that its input needs a gradient."""

    def __init__(self, *rest: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(8, 8)
        self.mlp: Any = nn.Sequential(nn.Linear(8, 32), nn.GELU(), *rest, nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        output: torch.Tensor = x + self.mlp(x)
        return output


def tiled_and_whole(layer: Layer, step: Callable[[Layer, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Check that ``step`` returns the same, and leaves the same gradients, with tiles as without; its result."""
    layer.double()
    x = torch.randn(1, 64, 8, dtype=torch.float64)
    found = []
    for tiled in (False, True):
        one = copy.deepcopy(layer)
        torch.manual_seed(1)
        with tile_mlp([one], 16) if tiled else nullcontext():
            result = step(one, x)
        found.append({"result": result, **gradients(one)})
    close(found[1], found[0])
    return found[1]["result"]


def test_hooks_of_a_parameter_run_once_on_the_sum() -> None:
    def step(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        calls = torch.zeros(3, dtype=torch.float64)

        def halved(gradient: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return gradient * 0.5

        def accumulated(parameter: torch.Tensor) -> None:
            calls[1] += 1
            parameter.grad = parameter.grad.clamp(-1, 1) if parameter.grad is not None else None

        def never(gradient: torch.Tensor) -> None:
            calls[2] += 1

        layer.mlp.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        layer.mlp.unused.register_hook(never)
        layer.mlp.unused.register_post_accumulate_grad_hook(never)
        layer.mlp[0].weight.register_hook(halved)
        layer.mlp[2].weight.register_post_accumulate_grad_hook(accumulated)
        layer(x).square().sum().backward()
        return calls

    assert tiled_and_whole(Layer(), step).tolist() == [1, 1, 0]


def test_weights_changed_in_place_raise_as_without_tiles() -> None:
    layer = Layer()
    frozen = layer.mlp[0].weight.requires_grad_(False)
    for parameter in (layer.mlp[2].weight, frozen):
        with tile_mlp([layer], 16):
            y = layer(torch.randn(1, 64, 8))
        with torch.no_grad():
            parameter.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_backward_uses_the_weights_that_forward_was_given() -> None:
    def step(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        layer.mlp[2].requires_grad_(False)
        given = {name: (one.detach() * 2).requires_grad_(one.requires_grad) for name, one in layer.named_parameters()}
        y = functional_call(layer, given, (x,))
        leaves = [one for one in given.values() if one.requires_grad]
        return torch.cat([one.flatten() for one in torch.autograd.grad(y.square().sum(), leaves)])

    assert tiled_and_whole(Layer(), step).any()


def test_a_parameter_may_be_frozen_or_freed_between_forward_and_backward() -> None:
    def step(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        layer.mlp[0].bias.requires_grad_(False)
        y = layer(x)
        layer.mlp[0].weight.requires_grad_(False)
        layer.mlp[0].bias.requires_grad_()
        y.square().sum().backward()
        return y.detach()

    tiled_and_whole(Layer(), step)


class Quantized(nn.Parameter):
    """Has an attribute that a saved tensor lacks."""

    scale: float


def test_a_frozen_weight_keeps_what_its_class_adds() -> None:
    def step(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        layer.mlp[0].weight = weight = Quantized(layer.mlp[0].weight.detach(), requires_grad=False)
        weight.scale = 3.0
        layer.mlp[0].register_forward_hook(lambda module, _, y: y * module.weight.scale)
        with saved_tensors_hooks(torch.detach, lambda saved: saved):
            y = layer(x)
        y.square().sum().backward()
        return y.detach()

    tiled_and_whole(Layer(), step)


def test_flags_and_buffers_that_change_before_backward_are_named() -> None:
    layer = Layer(nn.Dropout())
    layer.mlp.register_buffer("scale", torch.ones(1))

    changes: dict[str, Callable[[], object]] = {
        r"2\.training": layer.mlp[2].eval,
        r"2\.p": lambda: setattr(layer.mlp[2], "p", 0.1),
        r"scale \(in place\)": lambda: layer.mlp.scale.mul_(2),
        "scale": lambda: setattr(layer.mlp, "scale", torch.zeros(1)),
    }
    for name, change in changes.items():
        layer.train()
        with tile_mlp([layer], 16):
            y = layer(torch.randn(1, 64, 8))
        change()
        with pytest.raises(RuntimeError, match=rf"^{name}.* of 'mlp' of layer 0 \(Sequential\) has changed since"):
            y.sum().backward()


def test_flags_may_change_and_come_back_before_backward_and_settings_are_those_of_forward() -> None:
    dtypes: list[torch.dtype] = []

    def makes_its_mask(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        dtypes.append(torch.ones(1).dtype)
        return x * torch.ones(1)

    def step(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        layer.eval()
        with torch.no_grad():
            layer(x)
        layer.train()
        torch.set_default_dtype(torch.float64)
        try:
            y.square().sum().backward()
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        return y.detach()

    tiled_and_whole(Layer(Composed(makes_its_mask)), step)
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("given", [None, torch.Generator()], ids=["default", "the program's"])
def test_random_numbers_are_drawn_again(given: torch.Generator | None) -> None:
    generator = given or torch.default_generator
    masks: list[torch.Tensor] = []

    def noise(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        masks.append(torch.empty_like(x).bernoulli_(generator=given))
        return x * masks[-1]

    layer = Layer(Composed(noise))
    with tile_mlp([layer], 16):
        y = layer(torch.randn(1, 64, 8))
        after = generator.get_state()
        y.sum().backward()
    assert len(masks) == 8
    assert all(map(torch.equal, masks[:4], masks[4:]))
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(generator.get_state(), after)


class Router(nn.Module):
    """An expert behind a router, whose probabilities a balance loss asks for."""

    def __init__(self, leave: Callable[[nn.Module, torch.Tensor], object]) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(8, 2), nn.Linear(8, 8)
        self.leave = leave
        self.left: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(x).softmax(-1)
        self.leave(self, probabilities)
        output: torch.Tensor = self.expert(x) * probabilities[..., :1]
        return output


def test_what_an_mlp_puts_on_itself_is_refused() -> None:
    layer = Layer()
    layer.mlp = Router(lambda mlp, found: setattr(mlp, "aux", found.square().sum()))
    with tile_mlp([layer], 16), pytest.raises(TypeError, match=r"\(Router\) .* leave its attributes .* changes aux;"):
        layer(torch.randn(1, 64, 8))
    layer.mlp = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with tile_mlp([layer], 16), pytest.raises(TypeError, match=r"forward changes 1\.num_batches_tracked \(in place\);"):
        layer(torch.randn(64, 8))


def test_a_tensor_from_inside_loses_no_gradient_without_an_error() -> None:
    layer = Layer()
    layer.mlp = Router(lambda mlp, found: mlp.left.append(found))
    with tile_mlp([layer], 16):
        y = layer(torch.randn(1, 64, 8))
        y.sum().backward()  # nobody has asked for them
        y = layer(torch.randn(1, 64, 8))
    with pytest.raises(RuntimeError, match=r"'mlp' of layer 0 \(Router\) runs in tiles, so only its output may have"):
        (y.sum() + torch.cat(layer.mlp.left[4:], -2).square().sum()).backward()


def test_a_gradient_of_gradients_is_refused() -> None:
    layer, x = Layer(), torch.randn(1, 64, 8, requires_grad=True)
    with tile_mlp([layer], 16), pytest.raises(RuntimeError, match="create_graph=True must not be used with an MLP in"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_parameters_of_others_are_refused() -> None:
    layer = Layer()
    others = [nn.Parameter(torch.ones(8, 8))]
    layer.mlp = Composed(lambda own, x: own.linear(x) @ own.others[0], linear=nn.Linear(8, 8), others=others)
    with (
        tile_mlp([layer], 16),
        pytest.raises(TypeError, match=r"must use its input and parameters alone, .* of shape \(8, 8\)"),
    ):
        layer(torch.randn(1, 64, 8))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_that_a_hook_computes_before_the_tiles_is_refused() -> None:
    """The hook runs once around the tiles, so in backward there is no way from the weight to its parameters."""
    layer = Layer()
    layer.mlp = nn.utils.weight_norm(nn.Linear(8, 8))
    with tile_mlp([layer], 16):
        y = layer(torch.randn(1, 64, 8))
        with pytest.raises(TypeError, match=r"use the same parameters .*, but weight_g got no gradient"):
            y.sum().backward()


def test_an_in_place_change_of_what_backward_needs_raises_as_without_tiles() -> None:
    layer = Layer(Composed(lambda _, x: x.exp().mul_(2)))
    with tile_mlp([layer], 16):
        y = layer(torch.randn(1, 64, 8))
        with pytest.raises(RuntimeError, match="was changed in place after it was saved"):
            y.sum().backward()


def test_nothing_needs_a_gradient_where_everything_is_frozen() -> None:
    layer = Layer().requires_grad_(False)
    with tile_mlp([layer], 16):
        assert not layer(torch.randn(1, 64, 8)).requires_grad
        assert layer(torch.randn(1, 64, 8).requires_grad_()).requires_grad


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device_and_the_peak_is_a_tiles() -> None:
    layer = nn.Module()
    layer.mlp = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 256)).cuda().bfloat16()
    x = torch.randn(1, 16384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def peak() -> int:
        layer.mlp(x).sum().backward()  # gradients are there from now on
        with offload.memory_meter("cuda") as meter:
            try:
                torch.cuda.set_sync_debug_mode("error")
                layer.mlp(x).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return meter.peak_bytes

    whole = peak()
    with tile_mlp([layer], 1024):
        assert peak() < whole / 4
