"""One rank of the tensor-parallel models that ``test_subclasses.py`` starts, with and without offloading.

Run as ``python tensor_parallel_worker.py RANK WORLD_SIZE DEVICE FOLDER``; it leaves its findings in ``FOLDER/RANK.pt``.
"""

import gc
import time

import torch
from models import offloading, save, through
from ranks import be_rank
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

from offload import offload_layers
from offload.activations.handles import SubclassHandle

WIDTH = 32
TOKENS = 16
LATE_S = 0.3

MODELS = {
    "replicated": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence parallel": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
    "float8": {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()},  # gloo cannot gather float8
}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(name, mesh):
    torch.manual_seed(0)
    layers = nn.ModuleList(Mlp() for _ in range(4)).to(mesh.device_type, torch.bfloat16)
    if name == "float8":
        convert_to_float8_training(layers, config=Float8LinearConfig(emulate=True))
    for layer in layers:
        parallelize_module(layer, mesh, MODELS[name])
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.bfloat16).to(mesh.device_type)
    if name == "sequence parallel":
        x = DTensor.from_local(x.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous(), mesh, [Shard(1)])
    return layers, x.detach().requires_grad_()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(layers, x):
    leaves = [x, *layers.parameters()]
    for leaf in leaves:
        leaf.grad = None
    y = through(layers, x)
    local(y).float().square().mean().backward()
    return [local(leaf.grad) for leaf in leaves]


def innermost(tensor):
    if isinstance(tensor, collectives.AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    if isinstance(tensor, DTensor):
        return innermost(tensor.to_local())
    return [tensor._data, tensor._scale] if hasattr(tensor, "_data") else [tensor]


def saved_by(layer, x):
    """What autograd saves in a layer's forward, but for its parameters and ``x``, which is a leaf."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), lambda _: None):
        layer(x)
    leaves = {local(leaf).untyped_storage().data_ptr() for leaf in (x, *layer.parameters())}
    return [tensor for tensor in saved if innermost(tensor)[0].untyped_storage().data_ptr() not in leaves]


def compare(name, mesh):
    layers, x = build(name, mesh)
    expected = gradients(layers, x)
    saved = saved_by(layers[0], x)
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in saved
        for storage in (inner.untyped_storage() for inner in innermost(tensor))
    }
    with offload_layers(layers, num_layers=1, min_bytes=0, device=mesh.device_type) as handle:
        found = gradients(layers, x)
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "stats": handle.stats(),
        "expected bytes": sum(storages.values()),
        "dtypes in DTensors": {inner.dtype for t in saved if isinstance(t, DTensor) for inner in innermost(t)},
        "handles left": sum(type(held) is SubclassHandle for held in gc.get_objects()),
    }


def late_collective(rank, mesh):
    """Rank 0 saves the result of a collective that rank 1 joins only later."""
    received = []
    device = torch.device(mesh.device_type)
    offloaded = offloading(1, 3, device)

    def layer(y):
        if rank == 1:
            time.sleep(LATE_S)
        summed = collectives.all_reduce(torch.full((1024,), 1.0 + rank, device=device), "sum", mesh.get_group())
        assert isinstance(summed, collectives.AsyncCollectiveTensor)
        return save(y, received.extend, summed)

    x = torch.ones(1, device=device, requires_grad=True)
    offloaded.forward([layer, torch.neg, torch.neg], x).sum().backward()
    assert offloaded.stats.offloaded_bytes == 4 * 1024
    return torch.equal(received[0], torch.full((1024,), 3.0, device=device))


def find(rank, world, device):
    mesh = init_device_mesh(device.type, (world,))
    found = {name: compare(name, mesh) for name in MODELS}
    found["late collective"] = late_collective(rank, mesh)
    return found


if __name__ == "__main__":
    be_rank(find, adverse=True)
