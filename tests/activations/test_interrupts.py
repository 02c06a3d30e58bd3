"""An error at any line of the entry points: the next step is right, is offloaded, and nothing stays open."""

from __future__ import annotations

import contextlib

import pytest
import torch
from faults import InterruptAt
from lab import Lab
from models import WIDTH, assert_same, build, offloading, step_gradients
from torch import nn

import offload
from offload.activations import context, module_hooks, selective
from offload.base import layer_events, torch_private

MODULES = (torch_private, layer_events, context, module_hooks)


@pytest.mark.slow
@pytest.mark.nightly  # test_faults.py interrupts the same entry points at some of these lines
@pytest.mark.parametrize(
    ("kind", "error"), [("context", KeyboardInterrupt), ("hooks", KeyboardInterrupt), ("hooks", MemoryError)]
)
def test_every_line(kind: str, error: type[BaseException], lab: Lab) -> None:
    modules, x = build(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 3, lab.device
    )
    expected = step_gradients(modules, x)
    offloaded = offloading(1, 3, lab.device)
    if kind == "hooks":
        handle = offload.offload_layers(modules, 1, min_bytes=0)
        step = lambda: step_gradients(modules, x)  # noqa: E731  two ways to do the same
        stats = handle.stats
    else:
        step = lambda: step_gradients(modules, x, offloaded)  # noqa: E731  as above
        stats = offloaded.context.stats
    left_open = 0
    for line in range(1, 10_000):
        with InterruptAt(error, line, *MODULES) as interrupt, contextlib.suppress(error):
            step()
        if interrupt.left > 0:
            break
        if kind == "context" and offloaded.context._open:
            # Python runs a line of __exit__ before anything can be caught there; the next entry says what to do.
            with pytest.raises(offload.OffloadStateError, match=r"After an interrupt .* call reset\(\)"):
                step()
            offloaded.context.reset()
            left_open += 1
        for _ in range(2):
            before = stats()
            assert_same(expected, step())
            assert stats().offloaded_bytes > before.offloaded_bytes, f"after an interrupt at line {line}"
        assert stats().late_reloads == before.late_reloads
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert not selective.opened
    assert line > 150
    assert left_open <= len(modules)


def test_a_layer_that_nobody_has_entered_does_not_count(device: torch.device) -> None:
    """An interrupt can come when the layer has begun and before the context counts as entered."""

    class Interrupted(list[object]):
        def append(self, _: object) -> None:
            raise KeyboardInterrupt

    made, _ = offload.get_cpu_offload_context(True, 1, 3, min_bytes=0, device=device)
    made._entered = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        made.enter()
    made._entered = []
    with made:
        assert made._open.layer == 0
