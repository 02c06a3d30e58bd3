"""Saved tensors whose memory the program frees, to fill it again before backward, are the program's."""

import pytest
import torch
from lab import Lab
from models import NOTHING, Offloading, assert_same, offloading

ELEMENTS = 1 << 12
WHEN = ["at once", "while it is copied", "when the copy is queued", "when it is on the host"]


pytestmark = pytest.mark.usefixtures("adverse")


def step(offloaded: Offloading, when: str, nbytes: int, lab: Lab) -> list[torch.Tensor]:
    """The first layer's second tensor is resized and filled with other values, as PyTorch does not notice."""
    x = torch.linspace(0, 1, ELEMENTS, device=lab.device).requires_grad_()
    saved: list[torch.Tensor] = []

    def resize() -> None:
        saved[0].untyped_storage().resize_(nbytes)
        # Whoever reads or writes the memory that was freed shows.
        saved.append(torch.full((ELEMENTS,), 7.0, device=lab.device))

    def first(y: torch.Tensor) -> torch.Tensor:
        y = (y * 2).exp()
        saved.append(torch.linspace(1, 2, ELEMENTS, device=lab.device))
        y = y * saved[0]
        if when == "at once":
            resize()
        y = y.sin().cos()
        if when == "while it is copied":
            resize()
        return y

    y = offloaded.layer(first, x)
    if when == "when the copy is queued":
        resize()
    y = offloaded.forward([torch.neg, torch.neg], y)
    if when == "when it is on the host":
        resize()
    if saved[0].untyped_storage().nbytes() < 4 * ELEMENTS:
        saved[0].untyped_storage().resize_(4 * ELEMENTS)
        with torch.autograd._unsafe_preserve_version_counter(saved[0]):
            saved[0].copy_(torch.linspace(3, 4, ELEMENTS))
    gradients = list(torch.autograd.grad(y.sum(), x))
    assert saved[1].unique().tolist() == [7.0]
    return gradients


@pytest.mark.parametrize("nbytes", [0, 1024, 8 * ELEMENTS], ids=["freed", "cut", "grown"])
@pytest.mark.parametrize("when", WHEN)
def test_backward_reads_what_the_program_put_there(when: str, nbytes: int, lab: Lab) -> None:
    expected = step(NOTHING, when, nbytes, lab)
    offloaded = offloading(1, 3, lab.device)
    for _ in range(2):
        assert_same(expected, step(offloaded, when, nbytes, lab))
    assert offloaded.stats.skipped == {"resized": 2}
    assert offloaded.stats.reloaded_bytes > 0
    lab.drain()
    lab.pool.trim()
    assert lab.pool.used_bytes == 0


def test_after_backward_has_begun_it_reads_its_own(lab: Lab) -> None:
    """The graph is read twice; in between, the program resizes a tensor that is back from the host."""
    x = torch.linspace(0, 1, ELEMENTS, device=lab.device).requires_grad_()
    factor = torch.linspace(1, 2, ELEMENTS, device=lab.device)
    y = offloading(1, 3, lab.device).forward([lambda y: y * factor, torch.neg, torch.neg], x)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    factor.untyped_storage().resize_(0)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_resizing_what_nobody_saved(lab: Lab) -> None:
    storage = torch.ones(8, device=lab.device).untyped_storage()
    storage.resize_(64)
    assert storage.nbytes() == 64
    storage.resize_(0)
    assert storage.nbytes() == 0
