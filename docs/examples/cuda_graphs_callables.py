"""Let PyTorch capture a module that offloads inside, and train with it as with any module.

``torch.cuda.make_graphed_callables`` makes two graphs, one of the forward and one of the backward. The activations of
3 of 12 layers are offloaded in the first and reloaded in the second.

python docs/examples/cuda_graphs_callables.py
"""

import copy
import os

import torch
from torch import nn

from offload import get_cpu_offload_context

REQUIRES = "cuda"
LAYERS, OFFLOADED, STEPS = 12, 3, 5

# To compare bit by bit, kernels must add in the same order each time. Read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.use_deterministic_algorithms(True)
# make_graphed_callables keeps the autograd graph of its capture, and the first backward would warn about that.
torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

torch.manual_seed(0)
layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(LAYERS)).cuda()
reference = nn.Sequential(*copy.deepcopy(layers))

context, sync = get_cpu_offload_context(
    enabled=True,
    num_layers=OFFLOADED,
    model_layers=LAYERS,
    retain_pinned_cpu_buffers=True,
)


class OffloadedModel(nn.Module):
    """The layers, each of them in the offload context."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            with context:
                x = layer(x)
            x = sync(x)
        return x


def gradients(model, x):
    """One forward and backward; gradients start from None, since a graph writes them to the same memory each time."""
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


batches = [torch.randn(16, 1024, 1024, device="cuda") for _ in range(STEPS)]
expected = [gradients(reference, x) for x in batches]

# It runs the module a few times first, which also pins the host memory.
model = torch.cuda.make_graphed_callables(OffloadedModel(layers), (batches[0].clone(),))
captured = context.stats()
assert captured.offloaded_bytes > 0

for number, x in enumerate(batches):
    identical = all(map(torch.equal, gradients(model, x), expected[number]))
    print(f"batch {number}: gradients identical to those of the eager model: {identical}")
    assert identical
assert context.stats() == captured  # a replay runs no Python, so nothing was counted
print()
print(captured)
