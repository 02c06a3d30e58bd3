"""One rank of the pipelines that ``test_pipelining.py`` starts: all schedules, with and without offloading.

Run as ``python pipeline_worker.py RANK WORLD_SIZE DEVICE FOLDER``; it leaves its findings in ``FOLDER/RANK.pt``.
"""

import torch
from ranks import be_rank
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import offload.pipelining
from offload.pipelining.order import read_actions
from offload.planning.profile import Link

WIDTH = 32
MICROBATCHES = 2  # per rank: as few as all schedules take
ROWS = 16  # per microbatch
STEPS = 3
MIN_BYTES = 1024
FAST_LINK = Link(1e12, 1e12, 2e12)


def gpipe_order(stage, microbatches):
    """All forwards, then all backwards."""
    return read_actions(f"{stage}{kind}{microbatch}" for kind in "FB" for microbatch in range(microbatches))


def one_f_one_b_order(stage, stages, microbatches):
    """As many forwards as there are stages from this one on, then one backward and one forward in turn."""
    ahead = min(microbatches, stages - stage)
    order = [f"{stage}F{microbatch}" for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        order.append(f"{stage}B{microbatch}")
        order += [f"{stage}F{microbatch + ahead}"] if microbatch + ahead < microbatches else []
    return read_actions(order)


SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SCHEDULES = SINGLE + LOOPED + V_SHAPED

OPTIONS = {
    "measured": {"link": FAST_LINK},
    "in four parts, from the first step": {"link": FAST_LINK, "parts": 4},
}
POLICIES = {"*up*": "offload", "*norm*": "keep", "*": "recompute"}
WITH_POLICIES = {
    "regions, measured": {"link": FAST_LINK, "policies": POLICIES},
    "regions, from the first step": {"link": FAST_LINK, "policies": POLICIES},
    "all recomputed": {"link": FAST_LINK, "policies": {"*": "recompute"}},
}
"""With policies of the regions of the stages' layers."""
OPTIONS |= WITH_POLICIES
FEW = ["measured"]
SOME = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
"""For more than two ranks, of which some are neither first nor last: one schedule of each shape."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)).t()).t())


def loss_of(output, target):
    return (output - target).square().mean()


def stages_of(rank, world, name):
    if name in SINGLE:
        return world, [rank]
    if name in LOOPED:
        return 2 * world, [rank, rank + world]
    return 2 * world, [rank, 2 * world - 1 - rank]


def build(rank, world, name, device, **stage_options):
    count, mine = stages_of(rank, world, name)
    stages = []
    for index in mine:
        torch.manual_seed(index)
        module = nn.Sequential(Block(), Block()).to(device)
        stages.append(PipelineStage(module, index, count, device, **stage_options))
    kind = getattr(pipelining, name)
    return kind(stages[0] if name in SINGLE else stages, MICROBATCHES * world, loss_fn=loss_of), stages


def batch(stages, device):
    """As many rows as all microbatches have, of normal numbers."""
    world = stages[0].group_size
    return torch.randn(MICROBATCHES * world * ROWS, WIDTH, device=device)


def train(schedule, stages, device, steps=STEPS):
    """Gradients of each step; parameters move, so that one wrong step shows in all later ones."""
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        x, target = batch(stages, device), batch(stages, device)
        inputs = (x,) if any(stage.is_first for stage in stages) else ()
        targets = {"target": target} if any(stage.is_last for stage in stages) else {}
        schedule.step(*inputs, **targets, losses=[])
        found.append([parameter.grad.clone() for parameter in parameters])
        optimizer.step()
        optimizer.zero_grad()
    return found


def one_step(schedule, stage, seed=1):
    """The gradients of a step of one stage in one process."""
    torch.manual_seed(seed)
    x, target = torch.randn(2, 64, WIDTH)
    schedule.step(x, target=target)
    found = [parameter.grad for parameter in stage.submod.parameters()]
    stage.submod.zero_grad()
    return found


def same(found, expected):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def attach(schedule, **options):
    return offload.pipelining.attach(schedule, **{"link": FAST_LINK, "min_bytes": 1024} | options)


def equal(found, expected):
    return all(map(same, found, expected))


def compare(rank, world, name, device, expected, **options):
    schedule, stages = build(rank, world, name, device)
    before = [(stage.forward_one_chunk, stage.backward_one_chunk) for stage in stages]
    with offload.pipelining.attach(schedule, min_bytes=MIN_BYTES, **options) as handle:
        attached = all("forward_one_chunk" in vars(stage) for stage in stages)
        found = train(schedule, stages, device)
        listed = handle.plan.actions
    after = [(stage.forward_one_chunk, stage.backward_one_chunk) for stage in stages]
    own = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    return {
        "equal": equal(found, expected),
        "stats": handle.stats(),
        "actions": [repr(action) for action in listed],
        "ran": [repr(action) for action in handle._ran],
        "planned_bytes": handle.plan.offloaded_bytes,
        "saved_bytes": handle.plan.saved_bytes,
        "attached": attached,
        "regions": [handle.regions(stage.stage_index, layer) for stage in stages for layer in range(2)],
        "restored": before == after and not any(method in vars(stage) for stage in stages for method in own),
        "repr": repr(handle),
        "profile": handle.profile,
    }


def find(rank, world, device):
    found = {}
    labels = list(OPTIONS) if world == 2 else FEW
    for name in SCHEDULES if world == 2 else SOME:
        expected = train(*build(rank, world, name, device), device)
        profile = None
        for label in labels:
            known = {"profile": profile} if "from the first step" in label else {}
            found[name, label] = compare(rank, world, name, device, expected, **OPTIONS[label], **known)
            profile = found[name, label]["profile"]
    return found


if __name__ == "__main__":
    be_rank(find, adverse=True)
