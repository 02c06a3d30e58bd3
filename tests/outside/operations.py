"""PyTorch's own lists of operations and modules, each with its sample inputs, inside of offloaded layers.

An operation runs in the first two of four layers, on copies of the same inputs: its output, its gradients and theirs
are compared with the run without offloading.
"""

import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .comparison import (
    LAYERS,
    OFFLOADED,
    WITHOUT,
    Layer,
    Outcome,
    adverse,
    entry,
    fill_new_memory,
    outcome_of,
    seed_all,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "complex64": torch.complex64}
KINDS = ("operation", "module", "foreach", "custom", "function", "nested")

# Each way of offloading, with and without checkpointing. Half of the runs go on to the second derivative.
RUNS = (
    (("context", "plain", True), ("hooks", "checkpoint", False), ("regions", "plain", False)),
    (("hooks", "plain", False), ("context", "checkpoint", True), ("regions", "plain", True)),
)
"""Samples take these in turn; the only sample of an operation takes both."""

DRAWN = {
    ("operation", "float32"): 6,
    ("operation", "bfloat16"): 2,
    ("operation", "complex64"): 2,
    ("module", "float32"): 3,
    ("foreach", "float32"): 1,
    ("custom", "float32"): 1,
    ("function", "float32"): 1,
    ("nested", "float32"): 1,
}
"""How many operations of each list run with the other tests."""

CRASHING = ("nested", "split_with_sizes")
"""The one operation whose second derivative ends the process without the library, too, with PyTorch 2.11 to 2.15."""


@dataclass
class Sample:
    """A function of tensors, and what to call it with."""

    name: str
    make: Callable[[], Callable[..., Any]]
    """Makes the function anew, with its parameters and buffers as they were at first."""
    inputs: Any


@dataclass
class Report:
    """What became of one operation."""

    samples: int = 0
    runs: int = 0
    moved: int = 0
    """Runs in which something travelled."""
    failed_without: int = 0
    """Runs in which PyTorch raises without offloading; it must do so with it."""
    different: list[str] = field(default_factory=list)
    unrepeatable: list[str] = field(default_factory=list)
    skipped: str = ""


@functools.cache
def infos(kind: str) -> dict[str, Any]:
    """The entries of one of PyTorch's lists, by name."""
    found = list(_listed(kind))
    names: dict[str, Any] = {}
    for info in found:
        variant = getattr(info, "variant_test_name", "")
        name = f"{info.name}.{variant}" if variant else info.name
        while name in names:
            name += "'"
        names[name] = info
    return names


def _listed(kind: str) -> Iterator[Any]:
    if kind == "operation":
        from torch.testing._internal.common_methods_invocations import op_db

        yield from op_db
    elif kind == "module":
        from torch.testing._internal.common_modules import module_db

        yield from module_db
    elif kind == "foreach":
        from torch.testing._internal import common_methods_invocations as lists

        for which in ("unary", "binary", "pointwise", "reduce", "other"):
            yield from getattr(lists, f"foreach_{which}_op_db")
    elif kind == "custom":
        from torch.testing._internal.custom_op_db import custom_op_db

        yield from custom_op_db
    elif kind == "function":
        from torch.testing._internal.autograd_function_db import autograd_function_db

        yield from autograd_function_db
    elif kind == "nested":
        from torch.testing._internal.opinfo.definitions.nested import njt_op_db

        yield from njt_op_db


def differentiable(kind: str, dtype: str) -> list[str]:
    """Names of what has gradients in this type of number."""
    wanted = DTYPES[dtype]
    if kind == "module":
        # PyTorch lists only float32 and float64, but most modules take what their operations take.
        return [
            name
            for name, info in infos(kind).items()
            if wanted in info.supported_dtypes("cpu") or wanted is torch.bfloat16
        ]
    return [
        name
        for name, info in infos(kind).items()
        if info.supports_autograd and wanted in info.supported_backward_dtypes("cpu")
    ]


def draw(seed: int, most: int = 4) -> Iterator[tuple[str, str, str, int, int]]:
    """Arguments of :func:`check` for some operations of each list, with at most ``most`` samples of each."""
    generator = random.Random(seed)
    for (kind, dtype), count in DRAWN.items():
        names = [name for name in differentiable(kind, dtype) if (kind, name) != CRASHING]
        for name in generator.sample(names, count):
            yield kind, name, dtype, seed, most


def samples(kind: str, name: str, dtype: str) -> Iterator[Sample]:
    """The samples of one operation, and for those that can work in place of that too."""
    info = infos(kind)[name]
    if kind == "module":
        yield from _module_samples(info, DTYPES[dtype])
        return
    functions = [("", info.op)]
    if info.inplace_variant is not None and getattr(info, "supports_inplace_autograd", False):
        functions.append(("in place ", info.inplace_variant))
    for number, sample in enumerate(info.sample_inputs("cpu", DTYPES[dtype], requires_grad=True)):
        inputs = (sample.input, tuple(sample.args), dict(sample.kwargs))
        for what, function in functions:
            if not (what and sample.broadcasts_input):
                yield Sample(f"{what}{number}", lambda f=function: f, inputs)


def _module_samples(info: Any, dtype: torch.dtype) -> Iterator[Sample]:
    for training in (True, False):
        made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for number, inputs in enumerate(made):
            if inputs.forward_input is None:
                continue
            given = inputs.constructor_input
            module = info.module_cls(*given.args, **given.kwargs).to(dtype).train(training)
            what = "train" if training else "eval"
            call = inputs.forward_input
            first, *rest = call.args or (None,)
            make = functools.partial(copy.deepcopy, module)
            yield Sample(f"{what} {number}", make, (first, tuple(rest), dict(call.kwargs)))


def check(kind: str, name: str, dtype: str, seed: int = 0, most: int | None = None) -> Report:
    """Run one operation in all ways.

    Args:
        kind: One of ``KINDS``.
        name: Its name in PyTorch's list.
        dtype: Name of the type of number.
        seed: What the sample inputs are drawn with.
        most: How many samples to run, chosen at random with ``seed``; all by default.
    """
    report = Report()
    seed_all(seed)
    try:
        found = list(samples(kind, name, dtype))
    except Exception as error:  # noqa: BLE001  # such as a package that is not installed
        return Report(skipped=f"{type(error).__name__}: {str(error)[:300]}")
    if most is not None and len(found) > most:
        found = random.Random(seed).sample(found, most)
    with adverse():
        for number, sample in enumerate(found):
            report.samples += 1
            _check_sample(sample, RUNS[number % 2] if len(found) > 1 else RUNS[0] + RUNS[1], report)
    return report


def _check_sample(sample: Sample, runs: tuple[tuple[str, str, bool], ...], report: Report) -> None:
    for number, (way, computed, double) in enumerate(runs):
        without = WITHOUT[way]
        expected = run(sample, without, computed, double)
        found = run(sample, way, computed, double)
        report.runs += 1
        report.moved += found.offloaded_bytes > 0
        report.failed_without += bool(expected.error)
        different = expected.differences(found)
        # Each sample is repeated once, so that what is random is named also where it happens to be the same.
        changing = _changing(sample, expected, without, computed, double, 2 if different else int(number == 0))
        if changing:
            report.unrepeatable.append(f"{sample.name} {computed}: {', '.join(sorted(changing))}")
        if different - changing:
            report.different.append(f"{sample.name} {way} {computed}: {', '.join(sorted(different - changing))}")


def _changing(sample: Sample, expected: Outcome, without: str, computed: str, double: bool, times: int) -> set[str]:
    """What is not the same each time without offloading, or depends on memory that nobody wrote."""
    changing: set[str] = set()
    try:
        for byte in (0xFF, 0x5A)[:times]:
            fill_new_memory(byte)
            changing |= expected.differences(run(sample, without, computed, double))
    finally:
        fill_new_memory(0)
    return changing


def run(sample: Sample, way: str, computed: str, double: bool) -> Outcome:
    """One step: forward, backward, and with ``double`` the backward of that."""
    moved = 0

    def step() -> dict[str, torch.Tensor | None]:
        nonlocal moved
        leaves, spec = tree_flatten(sample.inputs)
        leaves = [_leaf(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        functions = [sample.make() for _ in range(OFFLOADED)]

        def call(function: Callable[..., Any], *carried: torch.Tensor) -> Any:
            # Copies: an operation may work in place, and what is saved of a leaf stays on the device.
            copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            if computed == "checkpoint":
                output = checkpoint(_call_on_copies, function, spec, *copies, use_reentrant=False)
            else:
                output = _call(function, spec, *copies)
            return *carried, *(item for item in tree_leaves(output) if isinstance(item, torch.Tensor))

        def passed(*carried: torch.Tensor) -> Any:
            # New tensors: what the operation saved of its own output is held by autograd alone.
            return tuple(item * 1 if item.requires_grad else item for item in carried)

        layers = [Layer(functools.partial(call, function)) for function in functions]
        layers += [Layer(passed) for _ in range(LAYERS - OFFLOADED)]
        outputs: tuple[torch.Tensor, ...] = ()
        with entry(way, layers) as (enter, counters):
            for layer in layers:
                outputs = enter(layer, outputs)
            wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            modules = [function for function in functions if isinstance(function, nn.Module)]
            wanted += itertools.chain.from_iterable(module.parameters() for module in modules)
            found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
            first = _gradients(outputs, wanted, create_graph=double)
            if counters is not None:
                moved = counters.stats().offloaded_bytes
            found |= {f"gradient {i}": g if g is None else g.detach() for i, g in enumerate(first)}
            if double:
                found |= {f"second gradient {i}": g for i, g in enumerate(_gradients(first, wanted))}
        for i, module in enumerate(modules):
            found |= {f"buffer {i} {name}": buffer for name, buffer in module.named_buffers()}
        return found

    outcome = outcome_of(step)
    outcome.offloaded_bytes = moved
    return outcome


def _call(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
    first, args, kwargs = tree_unflatten(leaves, spec)
    return function(first, *args, **kwargs)


def _call_on_copies(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
    # Recomputation begins with what was passed in; an operation in place must leave it alone.
    return _call(function, spec, *(leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _gradients(outputs: Any, wanted: list[torch.Tensor], *, create_graph: bool = False) -> list[torch.Tensor | None]:
    roots = [output for output in outputs if output is not None and output.requires_grad]
    if not roots or not wanted:
        return []
    weights = [_weights_like(root.detach()) for root in roots]
    return list(torch.autograd.grad(roots, wanted, weights, create_graph=create_graph, allow_unused=True))


def _weights_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout == torch.strided and not tensor.is_nested:
        return torch.randn_like(tensor)
    return tensor.clone()
