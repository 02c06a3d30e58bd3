"""What counts to a budget in bytes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from offload.measuring.memory_left import bytes_of_gradients


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
