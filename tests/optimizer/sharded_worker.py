"""One rank of the models that ``test_on_two_ranks.py`` trains, with streamed optimizer state and without.

Run as ``python sharded_worker.py RANK WORLD_SIZE DEVICE FOLDER``; it leaves its findings in ``FOLDER/RANK.pt``.
"""

import copy
import functools
import sys
import warnings
from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import be_rank
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from training import build, loss_of, plain_steps, stream

import offload
from offload.planning.training_bytes import RECIPES

STEPS = 6
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


def part(value):
    value = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    return (value.to_local() if isinstance(value, DTensor) else value).cpu().clone()


def parts(model, optimizer):
    state = optimizer.state_dict()["state"]
    return [part(parameter) for parameter in model.parameters()] + [
        part(value) for _, entry in sorted(state.items()) for _, value in sorted(entry.items())
    ]


def sharded(rank, world, device):
    model = build(device)
    mesh = init_device_mesh(device.type, (world,))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(rank, world, device):
    return DistributedDataParallel(build(device))


def each_rank_loss(model, number, rank):
    return loss_of(model, 2 * number + rank)


def train(make_model, rank, world, device, streamed, *, microbatches=1, clip=False, budget=None, **options):
    model = make_model(rank, world, device)
    optimizer = adamw(model.parameters())
    handle = stream(optimizer, **options) if streamed else None
    if budget is not None:
        layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
        handle = offload.prepare(model, optimizer, budget, layers=layers, device=device, min_bytes=0, **options)
    for number in range(STEPS):
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last)
            if handle is not None and not last:
                with handle.no_step():
                    each_rank_loss(model, number * microbatches + microbatch, rank).backward()
            else:
                each_rank_loss(model, number * microbatches + microbatch, rank).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, handle


CASES = {
    "FSDP2": (sharded, {}),
    "FSDP2, clipped, accumulated": (sharded, {"microbatches": 3, "clip": True}),
    "FSDP2, in backward": (sharded, {"in_backward": True}),
    "FSDP2, in backward, accumulated": (sharded, {"in_backward": True, "consume_gradients": True, "microbatches": 2}),
    "FSDP2, in backward, a part resident": (sharded, {"in_backward": True, "resident_bytes": "20KiB"}),
    "DDP": (replicated, {}),
    "DDP, clipped, accumulated": (replicated, {"microbatches": 3, "clip": True}),
    "DDP, clipped, beside the next forward": (replicated, {"clip": True, "overlap_forward": True}),
}


def in_backward_of_ddp(rank, world, device):
    model = replicated(rank, world, device)
    optimizer = adamw(model.parameters())
    stream(optimizer, in_backward=True)
    try:
        each_rank_loss(model, 0, rank).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def clipped_after_steps(rank, world, device):
    try:
        train(sharded, rank, world, device, True, clip=True, in_backward=True)
    except RuntimeError as error:
        return str(error)
    return ""


def checkpointed(rank, world, device):
    """A sharded checkpoint of PyTorch's, from a streamed run into a streamed one and into a resident one."""
    model, optimizer, _ = train(sharded, rank, world, device, True)
    saved = get_optimizer_state_dict(model, optimizer)
    kinds = {(type(v).__name__, v.device.type) for entry in saved["state"].values() for v in entry.values()}
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    found = {"kinds": sorted(kinds)}
    for streamed in (False, True):
        other = sharded(rank, world, device)
        other.load_state_dict(whole)
        optimizer = adamw(other.parameters())
        if streamed:
            stream(optimizer)
        set_optimizer_state_dict(other, optimizer, copy.deepcopy(saved))  # on the CPU, PyTorch would not copy it
        plain_steps(other, optimizer, range(2))
        found[streamed] = parts(other, optimizer)
    return found


def prepared(rank, world, device):
    """Budgets for everything, and for all but the optimizer state, which the table counts for this rank."""
    found = []
    for make_model, budgets in ((sharded, ("1GiB", "100KiB")), (replicated, ("1GiB", "200KiB"))):
        options = {"microbatches": 2, "clip": True}
        expected = parts(*train(make_model, rank, world, device, False, **options)[:2])
        for budget in budgets:
            model, optimizer, handle = train(make_model, rank, world, device, False, budget=budget, **options)
            recipes = handle.plan.recipes
            found.append((expected, parts(model, optimizer), handle.recipe, [one.recipe.weights for one in recipes]))
            found[-1] += (sum(recipes[0].state_bytes),)
    return found


def prepared_in_backward(rank, world, device):
    expected = parts(*train(sharded, rank, world, device, False, microbatches=2)[:2])
    options = {"microbatches": 2, "budget": "100KiB", "step_in_backward": True}
    consumed = [one for one in RECIPES if one.gradients == "consumed"]  # whatever is the fastest of this small model
    with patch.object(sys.modules["offload.prepare"], "RECIPES", consumed):
        model, optimizer, handle = train(sharded, rank, world, device, False, **options)
    return expected, parts(model, optimizer), handle.recipe, handle.stats()["optimizer"]


def removed(rank, world, device):
    model, optimizer, handle = train(sharded, rank, world, device, True)
    handle.remove()
    plain_steps(model, optimizer, range(2))
    expected, resident, _ = train(sharded, rank, world, device, False)
    plain_steps(expected, resident, range(2))
    kinds = {type(entry["exp_avg"]).__name__ for entry in optimizer.state.values()}
    return {"kinds": kinds, "found": parts(model, optimizer), "expected": parts(expected, resident)}


def sums_left(rank, world, device):
    """Gradients that are sums over ranks, which nobody has taken yet; last, those that the program has taken."""
    mesh = init_device_mesh(device.type, (world,))
    found, words = [], []
    for streamed, taken in ((False, False), (True, False), (False, True)):
        torch.manual_seed(0)
        values = torch.randn(6, 4, device=device)
        weights = [nn.Parameter(distribute_tensor(values, mesh, [place])) for place in (Replicate(), Shard(0))]
        # On GPUs PyTorch's choice, foreach kernels, lose what they add to a momentum that is a sum over ranks (2.11).
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=False)
        if streamed:
            stream(optimizer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                for weight in weights:
                    gradient = DTensor.from_local(values * (rank + 1), mesh, [Partial()])
                    weight.grad = gradient.redistribute(placements=weight.placements) if taken else gradient
                optimizer.step()
        found.append([part(weight) for weight in weights])
        words += [str(one.message) for one in said if "placement Partial" in str(one.message)]
    return *found, words


def find(rank, world, device):
    found = {}
    for name, (make_model, options) in CASES.items():
        found[name] = []
        for streamed in (False, True):
            model, optimizer, handle = train(make_model, rank, world, device, streamed, **options)
            found[name].append(parts(model, optimizer))
        found[name].append(handle.stats())
    cases = in_backward_of_ddp, clipped_after_steps, checkpointed, prepared, prepared_in_backward, removed, sums_left
    for case in cases:
        found[case.__name__] = case(rank, world, device)
    dist.barrier()
    return found


if __name__ == "__main__":
    be_rank(find)
