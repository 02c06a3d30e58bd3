"""What ``torch.compile`` knows of the library."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, Composed, assert_same, build, gradients, leaves_of, loss_of, through
from torch import nn

from offload import offload_layers, stream_weights
from offload.base import layer_events


def in_fresh_process(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_compiler_leaves_the_package_to_the_interpreter() -> None:
    """Also a compiler that is loaded after the first layer has been offloaded; other tests load the compiler first."""
    program = (
        "import offload.activations.context as context; context.OffloadContext(None, 1)\n"
        "import torch._dynamo; print(torch._dynamo.trace_rules.check_file(context.__file__).skipped)"
    )
    assert in_fresh_process(program) == "True"


Model = Any
"""Calls its ``layers`` in turn."""


def compiled_model(model: Model) -> Callable[[torch.Tensor], Any]:
    return torch.compile(model, backend="aot_eager", dynamic=False)


def compiled_step(model: Model) -> Callable[[torch.Tensor], Any]:
    @torch.compile(backend="aot_eager", dynamic=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y

    return step


def compiled_in_place(model: Model) -> Callable[[torch.Tensor], Any]:
    for layer in model.layers:
        layer.compile(backend="aot_eager", dynamic=False)
    return model


def compiled_layers(model: Model) -> Callable[[torch.Tensor], Any]:
    model.layers = nn.ModuleList(torch.compile(layer, backend="aot_eager", dynamic=False) for layer in model.layers)
    return model


@pytest.mark.slow
# Where a graph breaks in a function, the compiler looks at the results of layers, which are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("compiled", "kind"),
    [
        (compiled_model, "activations"),
        (compiled_step, "weights"),
        (compiled_in_place, "weights"),
        (compiled_layers, "activations"),
    ],
)
def test_hooks_that_come_and_go_after_a_compiled_step(
    compiled: Callable[[Model], Callable[[torch.Tensor], Any]], kind: str, device: torch.device, lab: Lab
) -> None:
    """The compiler does not see that a module's hooks have changed."""
    lab.adverse()
    layers, x = build(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), 3, device)
    model: Model = Composed(lambda own, x: through(own.layers, x), layers=layers)
    run = compiled(model)
    leaves = leaves_of(model, x)

    def step() -> list[torch.Tensor]:
        # Those of streamed weights are on the host.
        return [gradient.to(device) for gradient in gradients(leaves, lambda: loss_of(run(x)).backward())]

    expected = step()
    handle: Any = (
        offload_layers(model.layers, 1, min_bytes=0) if kind == "activations" else stream_weights(model.layers, device)
    )
    with handle:
        assert_same(expected, step())
        stats = handle.stats()
    if kind == "activations":
        assert stats.offloaded_bytes > 0
        assert stats.late_reloads == 0
    else:
        assert stats.loads > 0
        model.to(device)
    assert_same(expected, step())
    assert handle.stats() == stats
    assert torch._dynamo.trace_rules.check_file(layer_events.__file__).skipped
