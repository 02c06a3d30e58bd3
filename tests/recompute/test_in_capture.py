"""What policies do while a CUDA graph is captured, where a device only says that it is."""

import pytest
import torch
from lab import Lab
from models import assert_same, build, step_gradients, through
from test_policies import Seen, loss_of, offloaded

import offload

LAYERS = 4


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
