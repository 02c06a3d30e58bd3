"""What counts to a budget in bytes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from offload import memory_meter
from offload.measuring.memory_left import bytes_of_gradients, bytes_of_step


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_of_a_sharded_gradient_the_part_of_this_rank_counts() -> None:
    """A sharded tensor says that it has the bytes of all ranks."""
    mesh = init_device_mesh("cpu", (4,))
    sharded, whole = (nn.Parameter(torch.zeros(8)) for _ in range(2))
    sharded = nn.Parameter(DTensor.from_local(sharded.detach(), mesh, [Shard(0)], run_check=False))
    sharded.grad, whole.grad = torch.ones_like(sharded), torch.ones_like(whole)
    assert sharded.grad.nbytes == 4 * 8 * 4
    assert bytes_of_gradients([sharded, whole], torch.device("cpu")) == 2 * 8 * 4


@pytest.mark.parametrize("foreach", [(True, True), (False, False), (False, True)])
def test_what_a_step_allocates_is_known_from_small_ones(foreach: tuple[bool, bool]) -> None:
    """Of the larger group, whose way to step counts: tensors of all parameters, or of one at a time.

    In a loop, a tensor of the parameter before may be there as well.
    """
    small, large = ([nn.Parameter(torch.ones(size, 256)) for _ in range(4)] for size in (8, 256))
    groups = [{"params": one, "foreach": many} for one, many in zip((small, large), foreach, strict=True)]
    optimizer = torch.optim.AdamW(groups)
    predicted = bytes_of_step(optimizer, torch.device("cpu"))
    for parameter in (*small, *large):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with memory_meter("cpu") as meter:
        optimizer.step()
    assert 0.9 * meter.peak_bytes <= predicted <= 1.1 * meter.peak_bytes
