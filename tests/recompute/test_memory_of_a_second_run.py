"""Memory that a second run shares with others: masks, inference tensors, aliases, and threads that ask at once."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, assert_same, build, gradients, leaves_of, loss_of
from test_policies import ALL, Function, Seen, assert_right, offloaded
from test_second_run import garbage, step
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import offload

__all__ = ["garbage"]  # a fixture of these tests, too

LAYERS = 3


class Masked(nn.Module):
    """A layer with a mask that the layer adds, so that autograd saves no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + (self.lin(x) + mask.mean()).sin()


def test_a_mask_that_all_layers_are_given_is_not_offloaded(lab: Lab) -> None:
    layers, x = build(Masked, LAYERS, lab.device)
    bytes_of: list[int] = []
    for size in (1, 1 << 16):
        mask = torch.zeros(size, device=lab.device)

        def run(mask: torch.Tensor = mask) -> None:
            y = x * 1
            for layer in layers:
                y = layer(y, mask)
            loss_of(y).backward()

        expected = gradients(leaves_of(layers, x), run)
        with offloaded(layers, lab, ALL, 1) as handle:
            for _ in range(2):
                assert_same(expected, gradients(leaves_of(layers, x), run))
            bytes_of.append(handle.stats().offloaded_bytes)
    assert bytes_of[0] == bytes_of[1] > 0


@pytest.mark.parametrize("policies", [ALL, {"add": "keep", "*": "recompute"}], ids=["all", "sums kept"])
def test_an_attribute_that_is_an_inference_tensor(policies: dict[str, str], lab: Lab) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)
            with torch.inference_mode():
                self.positions = torch.linspace(0, 1, WIDTH)
                self.unread = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.lin(x).sin() + self.positions).tanh() * x

    layers, x = build(Layer, LAYERS, torch.device("cpu"))
    expected = step(layers, x)
    with offloaded(layers, lab, policies) as handle:
        for _ in range(3):
            assert_same(expected, step(layers, x))
        assert handle.regions(0)["sin"] == "recompute"


def test_policies_that_differ_behind_what_depends_on_data(lab: Lab) -> None:
    """There, saved tensors have no numbers: what was to be recomputed is offloaded where some is to be kept."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        tokens = (x.flatten(0, -2) @ w).tanh()
        (rows,) = (tokens[:, 0] > 0).nonzero(as_tuple=True)
        chosen = tokens[rows].sin().exp()
        return tokens.index_add(0, rows, chosen).cos().view_as(x) * x

    layers, x = build(lambda: Function(function), LAYERS, lab.device)
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

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            runs.append(threading.get_ident())
            if torch._C._current_graph_task_id() >= 0:
                time.sleep(0.2)  # the other thread comes meanwhile
            return self.lin(x).sin().exp(), self.lin(x + 1).cos().exp()

    layers, x = build(Fork, 1, lab.device)
    errors: list[BaseException] = []

    def backward(output: torch.Tensor, start: threading.Barrier) -> None:
        start.wait(30)
        try:
            loss_of(output).backward()
        except BaseException as error:  # noqa: BLE001  # the thread that joins raises it
            errors.append(error)

    def run() -> None:
        start = threading.Barrier(2)
        threads = [threading.Thread(target=backward, args=(one, start)) for one in layers[0](x)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def plain() -> None:
        one, other = layers[0](x)
        (loss_of(one) + loss_of(other)).backward()

    expected = gradients(leaves_of(layers, x), plain)
    with offloaded(layers, lab):
        for _ in range(2):
            gradients(leaves_of(layers, x), plain)
        runs.clear()
        found = gradients(leaves_of(layers, x), run)
    assert not errors
    assert len(runs) == 2
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)  # two threads add to one gradient in any order


def test_backward_frees_what_is_kept_behind_the_last_dropped_tensor(lab: Lab) -> None:
    """The second run ends before, and needs none of it; nor is it held as what was saved last."""
    made: list[StorageWeakRef] = []
    freed: list[bool] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() != -1:
                freed.extend(one.expired() for one in made)
                made.clear()
            hidden = self.up(x.relu()).sin().exp()
            made.append(StorageWeakRef(hidden.untyped_storage()))
            return self.down(hidden)

    layers, x = build(Layer, 1, lab.device)
    x = x.detach().repeat(64, *[1] * (x.ndim - 1)).requires_grad_()
    peaks = {}
    for policy in ("keep", "recompute"):
        with offloaded(layers, lab, {"relu": policy, "*": "keep"}, 0) as handle:
            step(layers, x)
            step(layers, x)
            made.clear()
            freed.clear()
            with offload.memory_meter(lab.device) as meter:
                step(layers, x)
            assert handle.regions(0)["relu"] == policy
        peaks[policy] = meter.peak_bytes
    assert freed == [True]
    assert peaks["recompute"] <= peaks["keep"]
