"""Three microbatches in flight, one forward and one backward in turn, with every move said by hand.

python docs/examples/manual.py
"""

import torch
from torch import nn

import offload

LAYERS, MICROBATCHES, IN_FLIGHT = 6, 8, 3
OFFLOADED = range(LAYERS - 1)  # the last layer's backward follows its forward too soon

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
hidden, tokens, dtype = (64, 2048, torch.float32) if device.type == "cpu" else (4096, 8192, torch.bfloat16)

torch.manual_seed(0)
with torch.device(device):
    layers = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        for _ in range(LAYERS)
    ).to(dtype)
    inputs = [torch.randn(tokens, hidden, dtype=dtype) for _ in range(MICROBATCHES)]

context, sync, synchronizer = offload.get_cpu_offload_context(
    enabled=True, model_layers=LAYERS, manual_synchronization=True
)


def forward(x):
    """One microbatch's forward; its layers go to the host one by one."""
    for number, layer in enumerate(layers):
        with context:
            if number in OFFLOADED:
                synchronizer.start_offload_layer(number)  # what the layer saves is copied as it is computed
            x = layer(x)
        x = sync(x)
        if number - 1 in OFFLOADED:
            # One layer later, so that compute need not wait for the copies.
            synchronizer.release_activation_forward_gpu_memory(number - 1)
    return x.float().square().mean()


def backward(loss, microbatch):
    """One microbatch's backward; layers are reloaded in the order in which backward needs them."""
    for number in reversed(OFFLOADED):
        synchronizer.start_reload_layer(number, microbatch=microbatch)
    loss.backward()


def plain_forward(x):
    """The same without offloading."""
    for layer in layers:
        x = layer(x)
    return x.float().square().mean()


def step(forward, backward):
    """One forward and one backward in turn, with several microbatches in flight."""
    losses = {}
    for microbatch in range(MICROBATCHES + IN_FLIGHT):
        if microbatch >= IN_FLIGHT:
            due = microbatch - IN_FLIGHT
            loss, number = losses.pop(due)
            backward(loss, number)
        if microbatch < MICROBATCHES:
            loss = forward(inputs[microbatch])
            losses[microbatch] = loss, synchronizer.microbatch  # which round this was, for its backward


def measure(forward, backward):
    """Peak of device memory in bytes, and the gradients."""
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with offload.memory_meter(device) as meter:
        step(forward, backward)
    return meter.peak_bytes, [parameter.grad for parameter in layers.parameters()]


kept_bytes, expected = measure(plain_forward, lambda loss, _: loss.backward())
offloaded_bytes, found = measure(forward, backward)

print(f"{IN_FLIGHT} microbatches in flight on {device.type}: activation peak {kept_bytes / 2**20:.1f} MiB")
print(f"with {len(OFFLOADED)} of {LAYERS} layers of each on the host: {offloaded_bytes / 2**20:.1f} MiB")
assert offloaded_bytes < 0.7 * kept_bytes
assert all(map(torch.equal, found, expected))
assert context.stats().late_reloads == 0
print("\ngradients are bit-identical\n")
print(context.stats())
