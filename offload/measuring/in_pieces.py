"""What of a step can be computed in pieces of its tokens: the loss in chunks, MLPs in tiles. A trial tells.

Both need less memory, and round sums in another order. A training has them where it does not fit its budget without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload.base.attributes import with_attribute
from offload.base.checks import warn_caller
from offload.base.layer_events import is_sharded
from offload.long_context import Undoable, chunk_loss, is_tiled, tile_mlp

PIECES = 8  # of the tokens of a microbatch
MOST_TOKENS = {"the loss in chunks, without logits": 2048, "MLPs in tiles": 32768}
"""What can be computed in pieces, as a plan calls it, and the most tokens of a piece."""
LOSS, MLP = MOST_TOKENS

LOGIT_BYTES = 12  # of a logit, beside the logit itself: its logarithm in float32, and the gradients of both
SUM_BYTES = 6  # of an element of the head's weight, whose gradient is summed in float32 over chunks
TRIED = 8  # tokens


@dataclass(frozen=True)
class _InPieces:
    name: str
    token_bytes: int  # device memory that a token takes in one piece
    held_bytes: int  # device memory that pieces take, whatever their size
    begin: Callable[[int], Undoable]  # with the tokens of a piece

    def needs(self, tokens: int) -> int:
        """Device memory that so many tokens take in one piece; 0 where pieces would take no less."""
        nbytes = self.token_bytes * tokens
        return nbytes if nbytes - nbytes // PIECES > self.held_bytes else 0


class Pieces:
    """What of a model can be computed in pieces, and is where a budget needs it, until :meth:`remove`."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], *, allowed: bool = True) -> None:
        self.left = _pieces_of(model, layers) if allowed else []  # what is not computed in pieces
        self.said: list[str] = []  # of what is
        self.due = False  # whether the next forward begins with one more, as nothing fits without
        self._undo = ExitStack()

    def begin(self, tokens: int, fits: Callable[[int], bool], *, labelled: bool) -> int:
        """A forward begins with so many tokens: compute in pieces what does not fit.

        Returns the device memory that the rest needs at once. Only a forward with labels computes the loss.
        """
        needed = {one: nbytes for one in self.left if (nbytes := one.needs(tokens)) and (labelled or one.name != LOSS)}
        begun = [*needed][:1] if self.due else [one for one, nbytes in needed.items() if not fits(nbytes)]
        if self.due and not begun:
            self.left = []  # nothing helps
        self.due = False
        for one in begun:
            self.left.remove(one)
            size = min(MOST_TOKENS[one.name], -(-tokens // PIECES))
            self._undo.callback(one.begin(size).remove)
            self.said.append(f"{one.name} of {size:,} tokens, which rounds sums in another order")
        if begun:
            without = ", and ".join(self.said[-len(begun) :])
            warn_caller(
                f"memory_budget fits nothing without {without}: the last bits of losses and gradients differ. Give "
                "more to keep them, or pass in_pieces=False, which keeps them in any case."
            )
        return max((nbytes for one, nbytes in needed.items() if one not in begun), default=0)

    def remove(self) -> None:
        self._undo.close()


def _pieces_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[_InPieces]:
    """What can be computed in pieces: the loss first, which costs no time."""
    if any(map(is_sharded, model.modules())):
        return []  # the trial would gather weights
    base: Any = getattr(model, "get_base_model", lambda: model)()
    found = []
    if _loss_can_be_chunked(base):
        weight = base.get_output_embeddings().weight
        token_bytes, held = (weight.element_size() + LOGIT_BYTES) * len(weight), SUM_BYTES * weight.numel()
        begin = partial(chunk_loss, base, evaluates=False)
        found.append(_InPieces(LOSS, token_bytes, held * weight.requires_grad, begin))
    mlps = [getattr(layer, "mlp", None) for layer in layers]
    kinds = {type(mlp): mlp for mlp in mlps}
    if mlps and all(sizes := [_saved_by_a_token(mlp) for mlp in kinds.values()]):
        found.append(_InPieces(MLP, max(sizes), 0, partial(tile_mlp, layers)))
    return found


class _NoBody:
    """Stands for what the body of a model returns: hidden states, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key == 0 else () if isinstance(key, slice) else None

    def __getattr__(self, _: str) -> None:
        return None


def _loss_can_be_chunked(base: Any) -> bool:
    """Whether a causal language model of Hugging Face has logits, and does nothing with them but compute the loss."""
    body = getattr(base, "base_model", base)
    if not isinstance(body, nn.Module) or body is base:
        return False
    try:
        weight = base.get_output_embeddings().weight
        tokens = torch.zeros(1, TRIED, dtype=torch.long, device=weight.device)
        hidden = _NoBody(weight.new_zeros(1, TRIED, weight.shape[1]))
        with with_attribute(body, "forward", lambda *_, **__: hidden), torch.no_grad():
            if base(input_ids=tokens, labels=tokens).logits is None:
                return False  # some other code has replaced them already
            with chunk_loss(base, None):
                return base(input_ids=tokens, labels=tokens).logits is None
    except Exception:  # noqa: BLE001  whatever the model does otherwise
        return False


def _saved_by_a_token(mlp: Any) -> int:
    """Bytes that autograd saves of each token in an MLP that can be tiled; 0 of others, and of one in tiles already.

    Such an MLP is made of linear layers, and computes each token by itself, without random numbers.
    """
    modes = {one: one.training for one in mlp.modules()} if isinstance(mlp, nn.Module) else {}
    linear = [one for one in modes if isinstance(one, nn.Linear)]
    own = {parameter for one in linear for parameter in one.parameters()}
    if is_tiled(mlp) or not linear or own != {*mlp.parameters()} or any(True for _ in mlp.buffers()):
        return 0
    if any(isinstance(one, nn.ModuleList) for one in modes):  # experts, perhaps
        return 0
    weight = linear[0].weight
    x = torch.randn(1, TRIED, linear[0].in_features, generator=torch.Generator().manual_seed(0), device="cpu").to(
        weight
    )
    saved: dict[int, int] = {one.untyped_storage().data_ptr(): 0 for one in (x, *own)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    try:
        with torch.enable_grad(), torch.random.fork_rng([weight.device] if weight.is_cuda else []):
            mlp.train()
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                whole = mlp(x.requires_grad_())
            parts = [mlp(part) for part in x.split(TRIED // 2, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
    except Exception:  # noqa: BLE001  it takes something else, or gives something else
        return 0
    finally:
        for one, training in modes.items():
            one.training = training
    return sum(saved.values()) // TRIED
