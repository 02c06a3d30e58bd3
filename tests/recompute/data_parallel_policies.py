"""One rank of the data-parallel models that ``test_data_parallel_policies.py`` starts.

Run as ``python data_parallel_policies.py RANK WORLD_SIZE DEVICE FOLDER``; what it finds is in ``FOLDER/RANK.pt``.
"""

import torch
from ranks import be_rank
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import offload
from benchmarks.workloads import NormMlpBlock

LAYERS, WIDTH, ROWS, STEPS = 5, 64, 32, 3
KINDS = ("ddp", "fsdp", "kept", "mixed", "compiled")
LONGER = (STEPS + 2, lambda *_: 8 * ROWS)
"""Steps, of which three are measured, and rows, whose activations are more than the gradients."""
VARYING = 12
"""Steps with another number of rows on each rank and in each step."""
BUDGETS = [("ddp", "3MiB"), ("ddp", "1GiB"), ("fsdp", "3MiB"), ("compiled", "3MiB")]
"""In 3 MiB not all activations can be kept."""
POLICIES = {
    "recompute": {"*": "recompute"},
    "products offloaded": {"*mm": "offload", "*": "recompute"},
    "products kept": {"*mm": "keep", "*": "recompute"},
}
ONE = {"kept": "products kept", "mixed": "recompute", "compiled": "products offloaded"}
"""Kinds with one of the policies; the others have all."""
CASES = [(kind, name) for kind in KINDS for name in POLICIES if ONE.get(kind, name) == name]


def build(kind, mesh, width=WIDTH):
    """A model of this kind, and its layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(NormMlpBlock(width) for _ in range(LAYERS))).to(mesh.device_type)
    if kind == "compiled":
        for layer in model:
            layer.compile(backend="aot_eager")
    if kind == "ddp":
        return DistributedDataParallel(model), list(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if kind == "mixed" else None)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=kind != "kept")
    return fully_shard(model, mesh=mesh, mp_policy=policy), list(model)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(step, rank):
    """A log-normal distribution; the longest of all is on another rank than the longest before it."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = torch.empty(1).log_normal_(4.0, 1.0, generator=generator)
    return 16 * ROWS if (step, rank) == (VARYING - 3, 1) else int(drawn.clamp(4, 8 * ROWS))


def train(model, rank, device, steps=STEPS, rows=lambda *_: ROWS, note=lambda: None):
    """The gradients of each step, and the weights afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        count, generator = rows(step, rank), torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(count, WIDTH, generator=generator).to(device)
        model(x).float().square().mean().backward()
        note()
        found += [local(parameter.grad).clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [local(parameter.detach()).clone() for parameter in model.parameters()]


def peak_bytes(kind, policies, mesh):
    """Of a step whose weights are much and whose activations are little."""
    model, layers = build(kind, mesh, 256)
    x = torch.randn(8, 256, device=mesh.device_type)

    def step():
        with offload.memory_meter(mesh.device_type) as meter:
            model(x).float().square().mean().backward()
        return meter.peak_bytes

    if policies is None:
        return [step() for _ in range(3)]
    with offload.offload_layers(layers, 2, min_bytes=1, policies=policies):
        return [step() for _ in range(3)]


def find(rank, world, device):
    device = device.type
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh(device, (world,))
    found = {}
    for kind in KINDS:
        expected = train(build(kind, mesh)[0], rank, device)
        for name, policies in [(name, POLICIES[name]) for of, name in CASES if of == kind]:
            model, layers = build(kind, mesh)
            options = {"policies": policies}
            with offload.offload_layers(layers, 2, min_bytes=1, **options) as handle:
                got = train(model, rank, device)
                different = [i for i, pair in enumerate(zip(expected, got, strict=True)) if not torch.equal(*pair)]
                regions = handle.regions(1)
                found[kind, name] = {"different": different, "regions": regions, "stats": handle.stats()}
    for kind in ("ddp", "fsdp", "compiled"):
        expected = train(build(kind, mesh)[0], rank, device, *LONGER)
        for budget in [budget for of, budget in BUDGETS if of == kind]:
            model, layers = build(kind, mesh)
            with offload.offload_layers(layers, memory_budget=budget, min_bytes=1) as handle:
                got = train(model, rank, device, *LONGER)
                different = [i for i, pair in enumerate(zip(expected, got, strict=True)) if not torch.equal(*pair)]
                made = handle.plan
            found[kind, budget] = {"different": different, "recompute_s": made.recompute_s, "layers": made.num_layers}
    for kind in ("ddp", "fsdp"):
        expected = train(build(kind, mesh)[0], rank, device, VARYING, rows_of)
        model, layers = build(kind, mesh)
        states = []
        with offload.offload_layers(layers, memory_budget="4MiB", min_bytes=1) as handle:
            got = train(model, rank, device, VARYING, rows_of, lambda h=handle, s=states: s.append(h.state))
            different = [i for i, pair in enumerate(zip(expected, got, strict=True)) if not torch.equal(*pair)]
            recompute_s, layers = handle.plan.recompute_s, handle.plan.num_layers
        found[kind, "varying"] = {"different": different, "states": states, "moved": recompute_s > 0 or layers > 0}
    for kind in ("fsdp", "compiled"):
        for name in (None, "recompute"):
            found[kind, name, "peak bytes"] = peak_bytes(kind, name and POLICIES[name], mesh)
    return found


if __name__ == "__main__":
    be_rank(find)
