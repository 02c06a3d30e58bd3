"""One rank of the models that ``test_data_parallel.py`` trains, with and without streamed weights.

Run as ``python data_parallel_worker.py RANK WORLD_SIZE DEVICE FOLDER``; it leaves its findings in ``FOLDER/RANK.pt``.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from models import WIDTH
from ranks import be_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offload import stream_optimizer, stream_weights

LAYERS = 4
STEPS = 3
TOKENS = 8
# Powers of two, so that hosts and GPUs round alike.
make_sgd = functools.partial(torch.optim.SGD, lr=2**-6)
make_momentum = functools.partial(make_sgd, momentum=0.5, weight_decay=2**-6)


def gradients_of(model):
    return [None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()]


class Block(nn.Module):
    """Several experts, of which a row's sign picks one; and a parameter that nothing uses."""

    def __init__(self, experts=1):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, expert=0):
        return x + self.out(torch.tanh(self.experts[expert](self.norm(x))))


class Model(nn.Module):
    """Parameters outside the layers before and behind them; which layers and experts run is told with each batch."""

    def __init__(self, experts=1, shared=False, checkpoints=None, order=range(LAYERS)):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(experts) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpoints = checkpoints
        self.order = order
        if shared:
            self.layers[2].out = self.layers[0].out

    def forward(self, x, skipped=(), expert=0):
        x = self.embed(x)
        for layer in [self.layers[number] for number in self.order if number not in skipped]:
            if self.checkpoints is None:
                x = layer(x, expert)
            else:
                x = checkpoint(layer, x, expert, use_reentrant=self.checkpoints)
        return self.head(x)


class Setting:
    """This rank's device and group."""

    def __init__(self, rank, world, device):
        self.rank, self.world, self.device = rank, world, device

    def build(self, dtype=torch.float32, **options):
        """A model whose weights differ from rank to rank until they are made equal."""
        torch.manual_seed(self.rank)
        return Model(**options).to(self.device, dtype)

    def batches(self, count, dtype=torch.float32):
        torch.manual_seed(100 + self.rank)
        return [torch.randn(TOKENS, WIDTH, dtype=dtype).to(self.device) for _ in range(count)]

    def wrap(self, model, *, static=False):
        return DistributedDataParallel(model, find_unused_parameters=not static, static_graph=static)

    def stream(self, model, *, own_group=False, static=False, **options):
        group = dist.new_group() if own_group else dist.group.WORLD
        streamed = stream_weights(model.layers, self.device, process_group=group, **options)
        return streamed, self.wrap(streamed.prepare_ddp(model), static=static)

    def train(
        self,
        model,
        streamed=None,
        *,
        microbatches=1,
        syncs="last",
        make=make_sgd,
        stream_state=False,
        told=lambda step, rank, number: {},
    ):
        """The losses, the gradients that each step leaves, and what the parameters are in the end, all on the CPU."""
        optimizer = make(model.parameters())
        if stream_state and streamed is not None:
            with pytest.raises(ValueError, match="in_backward must be False if the layers' gradients are averaged"):
                stream_optimizer(optimizer, in_backward=True)
            handle = stream_optimizer(optimizer, chunk_bytes="8KiB")
        dtype = next(model.parameters()).dtype
        found = []
        for step in range(STEPS):
            for number, x in enumerate(self.batches(microbatches, dtype)):
                last = number == microbatches - 1
                with contextlib.ExitStack() as stack:
                    if not last and syncs == "last":
                        stack.enter_context(model.no_sync())
                    loss = model(x, **told(step, self.rank, number)).float().square().mean() / microbatches
                    loss.backward()
                found.append(loss.item())
            found += gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
        if stream_state and streamed is not None:
            handle.remove()
        return found + [p.detach().cpu().clone() for p in model.parameters()]

    def compare(self, *, stream=None, build=None, **options):
        """What training gives with plain DDP, and with streamed weights."""
        stream, build = stream or {}, build or {}
        plain = self.wrap(self.build(**build), static=stream.get("static", False))
        expected = self.train(plain, **options)
        streamed, model = self.stream(self.build(**build), **stream)
        with streamed:
            found = self.train(model, streamed, **options)
            stats = streamed.stats()
        return {"expected": expected, "found": found, "stats": stats}


def skipping(step, rank, number):
    """Rank 0 leaves out the last layer, rank 1 the second; none runs the first one in the last step."""
    return {"skipped": [3 if rank == 0 else 1, *([0] if step == STEPS - 1 else [])]}


def other_experts(step, rank, number):
    return {"expert": (rank + step // 2) % 3}


def expert_of_the_microbatch(step, rank, number):
    return {"expert": number}


CASES = {
    "one microbatch": {"make": make_momentum},
    "no_sync": {"microbatches": 3},
    "no_sync in bfloat16": {"microbatches": 3, "build": {"dtype": torch.bfloat16}},
    "every microbatch": {"microbatches": 3, "syncs": "each", "stream": {"num_slots": 3}},
    "streamed state": {"microbatches": 2, "stream_state": True, "make": make_momentum},
    "experts": {"build": {"experts": 3}, "make": make_momentum, "told": other_experts},
    "experts with streamed state": {
        "build": {"experts": 3},
        "make": make_momentum,
        "told": other_experts,
        "stream_state": True,
    },
    "experts of each microbatch": {"build": {"experts": 3}, "microbatches": 2, "told": expert_of_the_microbatch},
    "skipped layers": {"told": skipping, "microbatches": 2, "stream": {"own_group": True}},
    "checkpoints": {"build": {"checkpoints": False}, "microbatches": 2},
    "reentrant checkpoints": {"build": {"checkpoints": True}, "stream": {"static": True}},
}
# Each part of a weight's gradient is averaged by itself, and so rounded.
ROUNDED = {
    "shared weights": {"build": {"shared": True}, "microbatches": 2},
    "layers that backward enters twice": {
        "build": {"checkpoints": True, "order": (0, 1, 2, 3, 0, 1, 2, 3)},
        "stream": {"static": True},
        "microbatches": 2,
        "syncs": "each",
    },
}


def without_wrapper(setting):
    """The layers alone: nothing else is trained, and nothing wraps them. Counts collectives per microbatch."""
    torch.manual_seed(setting.rank)
    layers = nn.ModuleList(Block() for _ in range(LAYERS)).to(setting.device)
    all_reduce, reduced = dist.all_reduce, []

    def counting(numbers, *options, **named):
        reduced.append(numbers.numel())
        return all_reduce(numbers, *options, **named)

    with stream_weights(layers, setting.device, process_group=dist.group.WORLD) as streamed:
        weights = [parameter.detach().clone() for parameter in layers.parameters()]
        dist.all_reduce = counting
        one, other = setting.batches(2)
        with streamed.no_sync():
            backward(layers, one)
        local = gradients_of(layers)
        inside = len(reduced)
        backward(layers, other)
        dist.all_reduce = all_reduce
        both = gradients_of(layers)
    return {"weights": weights, "local": local, "both": both, "inside": inside, "outside": len(reduced) - inside}


def in_float32(setting):
    """Gradients of bfloat16 weights, added up and averaged in float32; and each rank's own, in bfloat16."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Block() for _ in range(LAYERS)).to(setting.device, torch.bfloat16)
    batches = setting.batches(2, torch.bfloat16)
    own = []
    for x in batches:
        layers.zero_grad()
        backward(layers, x)
        own.append(gradients_of(layers))
    layers.zero_grad()
    for parameter in layers.parameters():
        parameter.grad_dtype = torch.float32
    with stream_weights(layers, setting.device, process_group=dist.group.WORLD) as streamed:
        with streamed.no_sync():
            backward(layers, batches[0])
        backward(layers, batches[1])
        return {"own": own, "found": gradients_of(layers)}


def other_layers(setting):
    """The error where ranks differ in their layers; the layers stay usable."""
    layers = nn.ModuleList(Block() for _ in range(2 + setting.rank)).to(setting.device)
    try:
        stream_weights(layers, setting.device, process_group=dist.group.WORLD)
    except ValueError as error:
        backward(layers, setting.batches(1)[0])
        return str(error)


def from_outside(setting):
    """The errors where a gradient does not come from its layer; the next backward works, and any after remove()."""
    layers = nn.ModuleList(Block() for _ in range(LAYERS)).to(setting.device)
    [x] = setting.batches(1)
    errors = []
    with stream_weights(layers, setting.device, process_group=dist.group.WORLD):
        if setting.device.type == "cpu":  # on GPUs, autograd may be anywhere in the layers when it comes to the weight
            try:
                backward(layers, x, layers[1].out.weight.square().sum())
            except RuntimeError as error:
                errors.append(str(error))
        hook = layers[1].out.weight.register_hook(lambda gradient: gradient)
        try:
            backward(layers, x)
        except RuntimeError as error:
            hook.remove()
            layers.zero_grad()
            backward([layer for layer in layers if layer is not layers[3 - setting.rank]], x)
            errors.append(str(error))
    found = gradients_of(layers)
    layers[1].out.weight.square().sum().backward()
    return errors, found


def backward(layers, x, more=0.0):
    for layer in layers:
        x = layer(x)
    (x.float().square().mean() + more).backward()


def find(rank, world, device):
    if device.type != "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    setting = Setting(rank, world, device)
    found = {name: setting.compare(**case) for name, case in (CASES | ROUNDED).items()}
    found |= {check.__name__: check(setting) for check in (without_wrapper, in_float32, other_layers, from_outside)}
    return found


if __name__ == "__main__":
    be_rank(find, adverse=True)
