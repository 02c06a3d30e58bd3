"""What ``torch.compile`` knows of the library."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import Lab
from models import WIDTH, Composed, assert_same, build, gradients, leaves_of, loss_of, through
from scripts import NO_GPU, Done, run_scripts
from torch import nn

from offload import offload_layers, stream_weights
from offload.base import layer_events


@pytest.mark.slow
def test_compiler_leaves_the_package_to_the_interpreter(tmp_path: Path) -> None:
    """Also a compiler that is loaded after the first layer has been offloaded; other tests load the compiler first."""
    firsts = ("offload.activations.context.OffloadContext(None, 1)", "offload.memory_meter('cpu').__enter__()")
    check = "import torch._dynamo; print(torch._dynamo.trace_rules.check_file(offload.__file__).skipped)"
    scripts = [tmp_path / f"{number}.py" for number in range(len(firsts))]
    for script, first in zip(scripts, firsts, strict=True):
        script.write_text(f"import offload\n{first}\n{check}")
    environment = os.environ | NO_GPU
    found = run_scripts([[str(one)] for one in scripts], tmp_path, environment, imported=("torch", "offload"))
    assert found == [Done(0, "True\n")] * len(firsts)


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
