"""The call that fits a whole training into a memory budget: its arguments, and the recipes among which it chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.activations.module_hooks import OffloadListener
from offload.base.checks import check_type, format_bytes, parse_budget, parse_bytes
from offload.base.find_layers import check_layers, find_layers, find_lists
from offload.base.layer_events import compute_device
from offload.device.select import get_backend, resolve_device
from offload.host.pool import get_host_pool
from offload.measuring.in_pieces import Pieces
from offload.measuring.memory_left import all_bytes, training_bytes, usable_bytes
from offload.optimizer.proof import with_groups
from offload.optimizer.state import pooled_bytes
from offload.optimizer.stream import CHUNK_BYTES, check_float32, check_overlap
from offload.planning.recipes import without_activations
from offload.planning.training_bytes import RECIPES
from offload.prepared import PreparedTraining
from offload.recompute.compiled_levels import parse_compile
from offload.weights.layer import check_parameters


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    memory_budget: int | str,
    max_host_bytes: int | str | None = None,
    *,
    layers: str | Callable[[nn.Module], Iterable[nn.Module]] | Iterable[nn.Module] | None = None,
    device: torch.device | str | int | None = None,
    state_dtype: torch.dtype | None = None,
    master_weights: bool = False,
    step_in_backward: bool = False,
    overlap_forward: bool = False,
    in_pieces: bool = True,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
    compile: bool | Mapping[str, Any] = False,  # noqa: A002  # as PyTorch calls it
) -> PreparedTraining:
    """Fit a whole training into a budget of device memory: weights, gradients, optimizer state and activations.

    The training loop does not change. Weights, gradients and optimizer state are held where the step is the shortest,
    on the device or on the host. In the rest of the budget, activations are kept, offloaded or recomputed::

        model = AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        with offload.prepare(model, optimizer, memory_budget="24GiB", max_host_bytes="100GiB") as prepared:
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print(prepared.plan)

    The model may be on the CPU or on the device. The first steps are measured, with much of the budget left for
    activations. At the end of the third step or so, the fastest recipe is put in place; ``plan`` has the table of all.

    If nothing fits otherwise, the loss is computed as by :func:`use_chunked_loss` in training, and MLPs as by
    :func:`tile_mlp`, where a trial shows that the model allows it. Then the last bits of the loss and of gradients
    differ, and the model's output has no logits in training; a warning and ``plan.in_pieces`` say so.

    In a process group of several ranks, the weights remain where they are, and each rank chooses the rest for itself.
    Weights that :func:`stream_weights` already streams remain streamed.

    Args:
        model: The model. Inputs belong on ``device``.
        optimizer: The optimizer of the model's parameters. ``step()``, schedulers, clipping and ``state_dict()`` work
            as before. Give several optimizers as a list, in which each has parameters of its own: the state of one that
            is left out is not counted. Recipes change when each of them has stepped.
        memory_budget: All device memory that the training may use, in bytes or as a text such as ``"24GiB"``; or
            ``"auto"``: the free memory of the device, and the memory that model and optimizer have there.
        max_host_bytes: All pinned host memory that it may use; by default what the system has left.
        layers: The layers in the order in which forward calls them, or a function that returns those of a model, or the
            name of a list of modules in the model, such as ``"model.layers"``. By default, all lists of modules that
            are not inside others, such as an encoder's and a decoder's, except lists of single operations. The first
            forward raises an error if it calls the lists in another order than the model has them in.
        device: Where to train; ``None`` is the current accelerator, and the CPU where there is none.
        state_dtype: ``torch.float32`` holds optimizer state in float32 and steps in float32, for parameters of 16 bits;
            ``None`` leaves that to the optimizer. Load a checkpoint after this call. See :func:`stream_optimizer`.
        master_weights: Whether to step float32 weights, as :func:`stream_optimizer` does; needs ``state_dtype``.
        step_in_backward: Whether parameters may be stepped in backward, as soon as their gradients are complete. Then
            gradients need no memory of their own. Leave it out with clipping or ``GradScaler``; with accumulation, use
            :meth:`PreparedTraining.no_step`.
        overlap_forward: Whether a step of streamed state may run while the next forward runs, as in
            :func:`stream_optimizer`. It changes nothing in recipes that step in backward or hold weights on the host.
        in_pieces: Whether the loss and MLPs may be computed in pieces if nothing fits otherwise, which changes the last
            bits.
        min_bytes: Activations below this size are kept on the device.
        compile: Whether to compile the layers, as :func:`offload_layers` does it; or arguments of ``torch.compile``.

    Returns:
        A handle with ``plan``, ``recipe``, ``stats()`` and ``remove()``, which is also a context manager.

    Raises:
        ValueError: No recipe fits; the message says how much device memory and host memory each would need. The layers
            were not found, or the optimizer does not hold the model's parameters. Nothing has been changed.
        TypeError: An argument is of another type; the message says which, and what to give.
    """
    check_type("model", model, nn.Module, "a module")
    optimizers: list[Any] = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    if not optimizers:
        raise ValueError("optimizer must be one of the model's parameters, or several in a list, got an empty one.")
    for one in optimizers:
        check_type("optimizer", one, torch.optim.Optimizer, "a torch.optim.Optimizer of the model's parameters")
    check_float32(state_dtype, master_weights=master_weights)
    flags = {"step_in_backward": step_in_backward, "overlap_forward": overlap_forward, "in_pieces": in_pieces}
    for name, flag in flags.items():
        check_type(name, flag, bool, "True or False")
    target = resolve_device(device)
    budget = all_bytes(target, model, optimizers) if memory_budget == "auto" else parse_budget(memory_budget)
    most = None if max_host_bytes is None else parse_bytes(max_host_bytes, "max_host_bytes")
    if overlap_forward:
        check_overlap(one for each in optimizers for _, one in with_groups(each))
    parse_bytes(min_bytes, "min_bytes")
    parse_compile(compile)
    found: Any = layers
    lists = find_lists(model) if layers is None else {}
    if len(lists) > 1:
        found = [layer for one in lists.values() for layer in one]
    elif layers is None or isinstance(layers, str) or (callable(layers) and not isinstance(layers, nn.Module)):
        found = find_layers(model, layers)
    modules = check_layers(found, OffloadListener, "offloaded")
    # Six slots of each optimizer take together at most a thirtieth of the budget.
    chunk_bytes = max(1 << 11, min(CHUNK_BYTES, budget // 180 // len(optimizers)))
    in_float32: dict[str, Any] = {"state_dtype": state_dtype, "master_weights": master_weights}
    training = training_bytes(model, modules, optimizers, chunk_bytes, target, **in_float32)
    places: set[str] = {"resident", "streamed"}
    why = ""
    own = sum(map(pooled_bytes, optimizers))  # which an earlier call has left on the host
    if compute_device(modules) is not None:
        places = {"streamed"}  # by the program
        own += sum(training.layer_weights)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        places = {"resident"}  # where each rank may choose for itself what is shortest
    else:
        try:
            check_parameters(modules)
        except (TypeError, ValueError) as error:
            places, why = {"resident"}, f" Weights cannot be streamed: {str(error).partition(';')[0]}."
    alone = len(optimizers) == 1  # which can step streamed weights in backward
    recipes = [
        recipe
        for recipe in RECIPES
        if recipe.weights in places
        and (recipe.gradients != "consumed" or (step_in_backward and (recipe.weights == "resident" or alone)))
        and (state_dtype is None or recipe.optimizer != "cpu")
    ]
    room = get_host_pool(get_backend(target)).room_bytes()
    host = min((one for one in (most, None if room is None else room + own) if one is not None), default=None)
    plan = replace(without_activations(training, usable_bytes(budget, target), host, recipes), memory_budget=budget)
    if not plan.fits:
        needs = "; ".join(f"{one.recipe}: {one.reason}" for one in plan.recipes)
        raise ValueError(
            f"memory_budget must hold weights, gradients and optimizer state in some way, got {format_bytes(budget)} "
            f"and {'no limit of' if host is None else format_bytes(host) + ' of'} host memory. {needs}.{why} Give "
            "more, or train fewer parameters (LoRA)."
        )
    follow = {"min_bytes": min_bytes, "compiles": compile}
    options = in_float32, overlap_forward, chunk_bytes, follow, Pieces(model, modules, allowed=in_pieces)
    return PreparedTraining(model, modules, lists, optimizers, training, plan, target, *options)
