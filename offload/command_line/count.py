"""Count what a step of a Hugging Face language model does, by its config: bytes, seconds and regions of each layer.

The model is made of fake tensors, which have sizes and no memory, and runs forward and backward once. An operation
takes as long as its FLOP or its bytes take. PyTorch's kernels for the CPU are counted: attention is one operation that
saves no scores, as on a GPU; an element of a dropout mask takes two bytes in bfloat16, not one.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from offload.base.attributes import with_attribute
from offload.base.checks import check_number
from offload.base.find_layers import find_lists
from offload.base.tensors import tensors_of
from offload.base.torch_private import FakeTensorMode, schema_of
from offload.device.backend import Backend, Event
from offload.long_context import use_chunked_loss
from offload.measuring.layer_times import LayerTimes
from offload.observe.memory import CpuAllocations
from offload.planning.layer_costs import with_workspace
from offload.planning.profile import LayerProfile, Profile
from offload.planning.training_bytes import TrainingBytes
from offload.recompute.costs import RegionProfile
from offload.recompute.learn import ModuleNames, SavedTensor, Step, Storage, Trace
from offload.recompute.operations import Operation, known_operation
from offload.recompute.way import Way, list_regions, names_of, shared_inputs, without_shared

MOST_OPERATIONS = 3000
"""In a layer's forward: a loop over the tokens takes minutes to count, and stands for a kernel that is missing."""

_FLOP = {str(operation): flop for operation, flop in flop_registry.items()}


@dataclass(frozen=True)
class Rates:
    """How fast a device computes and reads its memory, inside of layers."""

    flop_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_number("flops", self.flop_per_s, positive=True)
        check_number("bandwidth", self.bytes_per_s, positive=True)


class Counted(NamedTuple):
    """What a model's step does, the layers as Python calls them, and what its training has beside activations."""

    profile: Profile
    layers: str
    parameters: int
    training: TrainingBytes  # with no slots for the state of a streamed optimizer


def read_config(model: str, changes: Iterable[str] = ()) -> Any:
    """The config at a path or of a model type, with ``changes`` such as ``num_hidden_layers=8``."""
    from transformers import AutoConfig

    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text("utf-8")) if path.is_file() else {"model_type": model}
        known = {*AutoConfig.for_model(values.get("model_type")).to_dict(), *values}
    except (ValueError, AttributeError) as error:
        raise ValueError(
            "model must be the path of a Hugging Face config.json or of its folder, or a model type such as llama, got "
            f"{model!r} ({_said(error)}); a model's id on the Hub is not looked up: download its config.json"
        ) from None
    for name, _, text in (change.partition("=") for change in changes):
        if name not in known or not text:
            raise ValueError(f"--set must be NAME=VALUE with a field of the config, got {name}={text}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return AutoConfig.for_model(**values)


def count_model(
    config: Any,
    batch: int,
    tokens: int,
    rates: Rates,
    min_bytes: int,
    *,
    state: int | None = None,
    lora: int | None = None,
    fused_loss: bool = False,
) -> Counted:
    """Count a step with ``batch`` sequences of ``tokens`` tokens each; storages below ``min_bytes`` are not offloaded.

    A trained parameter has ``state`` bytes of optimizer state, or AdamW's two numbers of its dtype. Adapters of rank
    ``lora`` are on all linear layers. The loss may be that of :func:`offload.use_chunked_loss`. A ``ValueError`` says
    why a step cannot be counted.
    """
    fake = FakeTensorMode()
    try:
        model = _build(fake, config, lora)
        lists = find_lists(model)
        layers = [layer for one in lists.values() for layer in one]
        if not layers:
            raise ValueError("it has no list of two layers or more")
        for parameter in model.parameters():
            if parameter.requires_grad:  # gradients are counted by the weights
                parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        if fused_loss:
            use_chunked_loss(model)
        count = StepCount(model, layers, rates, min_bytes)
        from transformers import masking_utils

        # Hugging Face looks into the numbers of positions whether they are of several sequences: they are not.
        one_sequence_each = with_attribute(masking_utils, "find_packed_sequence_indices", lambda *_: None)
        with fake, one_sequence_each, count.counting():
            numbers = torch.zeros(batch, tokens, dtype=torch.int64)
            model(input_ids=numbers, labels=numbers, use_cache=False).loss.backward()
        profile = count.profile()
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        raise ValueError(
            f"model_type {config.model_type!r} cannot be counted: {_said(error)}; measure this model with "
            "offload.profile_layers"
        ) from error

    def state_of(parameter: nn.Parameter) -> int:
        return parameter.requires_grad * (2 * parameter.nbytes if state is None else state * parameter.numel())

    own, names = [list(layer.parameters()) for layer in layers], [f"model.{name}" for name in lists]
    training = TrainingBytes.of(list(model.parameters()), own, state_of, slots=0)
    # The optimizer reads and writes weights and state, and reads gradients; trained weights are as large as these.
    stepped_s = (2 * training.state + 3 * training.gradients) / rates.bytes_per_s
    return Counted(
        replace(profile, other_s=stepped_s),
        names[0] if len(names) == 1 else f"[{', '.join(f'*{name}' for name in names)}]",
        sum(one.numel() for one in model.parameters()),
        training,
    )


def _build(fake: Any, config: Any, lora: int | None) -> nn.Module:
    import transformers

    kind = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
        config.decoder_start_token_id = getattr(config, "decoder_start_token_id", None) or 0
    if getattr(config, "quantization_config", None):
        raise ValueError("its weights are quantized")
    dropout = {name: rate for name, rate in config.to_dict().items() if "att" in name and "drop" in name and rate}
    for name, rate in dropout.items():  # PyTorch's kernel for the CPU has none, so that all scores would be saved
        raise ValueError(f"{name} is {rate}, which --set {name}=0 leaves out")
    wanted = config.dtype or torch.bfloat16
    with fake:
        model: Any = kind.from_config(config, dtype=getattr(torch, wanted) if isinstance(wanted, str) else wanted)
    if model.main_input_name != "input_ids":
        raise ValueError(f"it takes {model.main_input_name}, not tokens")
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"):  # from where PEFT does not move adapters, which cannot be done to fake tensors
            model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))
        for module in model.modules():
            for name, one in [*module.named_parameters(recurse=False)]:
                if one.is_meta:
                    setattr(module, name, nn.Parameter(fake.from_tensor(one).to("cpu")))
    trained: nn.Module = model.train()
    return trained


class _Clock(Backend):
    """Seconds that operations would take."""

    now_s = 0.0

    def mark(self) -> Event:
        return cast("Event", self.now_s)

    def seconds(self, marks: Iterable[tuple[Any, Any]]) -> list[float]:
        return [end - begin for begin, end in marks]


class _Forward:
    """What is noted of a layer's first forward: its trace, and the seconds of each operation."""

    def __init__(self, layer: nn.Module, moves: Callable[[torch.Tensor], bool]) -> None:
        self._names, self._moves = ModuleNames(layer), moves
        self._trace, self._seconds = Trace(), list[float]()
        self._numbers = WeakKeyDictionary[torch.UntypedStorage, int]()
        self._references: list[StorageWeakRef] = []

    def note(
        self, operation: Operation, seconds: float, read: Iterable[torch.Tensor], made: Iterable[torch.Tensor]
    ) -> None:
        trace, before = self._trace, len(self._trace.storages)
        if len(trace.steps) == MOST_OPERATIONS:
            raise ValueError(f"a layer runs more than {MOST_OPERATIONS:,} operations, as if it looped over the tokens")
        reads = dict.fromkeys(map(self._number_of, read))
        trace.given += [one for one in reads if one >= before]
        known = len(trace.storages)
        results = dict.fromkeys(map(self._number_of, made))
        makes = tuple(one for one in results if one >= known)
        writes = tuple(one for one in results if one < known and operation.written)
        for one in (*makes, *writes):
            trace.storages[one].writers.append(len(trace.steps))
        trace.steps.append(Step(operation, tuple(reads), makes, writes, (), None, self._names.current()))
        self._seconds.append(seconds)

    def save(self, tensor: torch.Tensor) -> None:
        saved = self._number_of(tensor), len(self._trace.steps), 0, tensor.shape, tensor.stride(), tensor.dtype
        self._trace.saved.append(SavedTensor(*saved, movable=self._moves(tensor)))

    def regions(self, forward_s: float) -> tuple[tuple[RegionProfile, ...], list[StorageWeakRef]]:
        """The regions, and the memory of the inputs among them, which are the first ones."""
        no_state: Any = None  # the layer never runs again
        way = Way(self._trace, no_state, names_of(self._trace))
        return list_regions(way, self._seconds, forward_s), [self._references[number] for number in way.sources]

    def _number_of(self, tensor: torch.Tensor) -> int:
        storage, trace = tensor.untyped_storage(), self._trace
        if storage not in self._numbers:
            self._numbers[storage] = number = len(trace.storages)
            trace.storages.append(Storage(storage.nbytes()))
            self._references.append(StorageWeakRef(storage))
            trace.movable_inputs |= {number} if self._moves(tensor) else set()  # those that are given
        return self._numbers[storage]


class StepCount(CpuAllocations):
    """Counts seconds, memory, and the regions of each layer's first forward."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], rates: Rates, min_bytes: int) -> None:
        super().__init__()
        self._clock, self._rates, self._least = _Clock(torch.device("cpu")), rates, min_bytes
        self._times = LayerTimes(layers, self._clock)
        self._forwards = [_Forward(layer, self._moves) for layer in layers]
        weights = (one.untyped_storage() for one in (*model.parameters(), *model.buffers()))
        self._weights = WeakKeyDictionary(dict.fromkeys(weights))
        # A layer's times ask the count for peaks, as they ask an allocator.
        self.start = self.begin_part = self.forget_peak
        self.stop, self.most_bytes, self.other_bytes = (lambda: None), (lambda: self.peak_bytes), (lambda: 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self._times, self, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            self._times.start(cast("Any", self))
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        read, made = tensors_of([*args, *(kwargs or {}).values()]), tensors_of(result)
        known, operation = {one.untyped_storage() for one in read}, known_operation(func)
        if operation.written or any(one.untyped_storage() not in known for one in made):  # else it is a view
            nbytes = sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in (*read, *made))
            flop = _flop_of(func, args, kwargs or {}, result)
            seconds = max(flop / self._rates.flop_per_s, nbytes / self._rates.bytes_per_s)
            self._clock.now_s += seconds
            if self._times.running is not None:
                self._forwards[self._times.running.number].note(operation, seconds, read, made)
        return result

    def _moves(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage not in self._weights and storage.nbytes() >= self._least

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._times.running is not None:
            self._forwards[self._times.running.number].save(tensor)
        return tensor if tensor.is_leaf else tensor.detach()

    def profile(self) -> Profile:
        """What was counted, if every layer has run forward and backward."""
        if len(self._times.ran) < len(self._times.layers):
            raise ValueError("some of its layers run no forward, or no backward")
        each_s = self._times.seconds()
        found = [one.regions(forward_s) for one, (forward_s, _) in zip(self._forwards, each_s, strict=True)]
        shared = shared_inputs([given for _, given in found])
        regions = [without_shared(*layer, shared) for layer in found]
        layers = [LayerProfile.from_regions(one, *seconds) for one, seconds in zip(regions, each_s, strict=True)]
        return with_workspace(Profile(tuple(layers), self._times.loss_s()), self._times.peaks())


def _said(error: BaseException) -> str:
    return textwrap.shorten(str(error).strip().partition("\n")[0], 160).rstrip(".")


def _flop_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """FLOP of a product, of a convolution, or of attention, which computes half of all scores if it is causal."""
    name = str(getattr(func, "overloadpacket", "")).replace("attention_for_cpu", "attention")
    known = _FLOP.get(name)
    if known is None:
        return 0.0
    given = {one.name: value for one, value in zip(schema_of(func).arguments, args, strict=False)} | kwargs
    groups = 1
    if "dot_product" in name:  # PyTorch 2.11 counts only as many heads of queries as of keys
        heads, shared = given["query"].shape[1], given["key"].shape[1]
        groups = heads // shared
        args = tuple(
            one[:, :shared] if isinstance(one, torch.Tensor) and one.ndim == 4 and one.shape[1] == heads else one
            for one in args
        )
    return groups * float(known(*args, **kwargs, out_val=result)) / (2 if given.get("is_causal") else 1)
