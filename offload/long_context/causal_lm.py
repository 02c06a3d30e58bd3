"""Hugging Face's causal language models with a loss that needs no logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from offload.base.checks import check_int
from offload.base.layer_events import Handle, replace_attribute
from offload.long_context.chunked_loss import CHUNK_TOKENS, chunked_cross_entropy


class ChunkedLoss(Handle):
    """A model whose loss needs no logits; made by :func:`use_chunked_loss`, undone by :meth:`remove`.

    As a context manager it is undone at the end of the block.
    """

    def __init__(self, model: Any, head: Any, chunk_tokens: int, *, liger: bool | None) -> None:
        self._head = head
        self._cross_entropy = partial(chunked_cross_entropy, chunk_tokens=chunk_tokens, liger=liger)
        self._signature = inspect.signature(model.forward)
        self._has_labels = False
        self._logits = head.forward
        self._undo: list[Callable[[], None]] = [
            replace_attribute(head, "forward", self._no_logits),
            replace_attribute(model, "_loss_function", self._loss),
            model.register_forward_pre_hook(self._begin, with_kwargs=True).remove,
            model.register_forward_hook(self._end, always_call=True).remove,
        ]

    def remove(self) -> None:
        """Let the model compute logits again. Graphs that exist stay valid. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._has_labels = self._signature.bind_partial(*args, **kwargs).arguments.get("labels") is not None

    def _no_logits(self, hidden: Tensor) -> Any:
        return LogitsNotMade(hidden) if self._has_labels else self._logits(hidden)

    def _loss(self, logits: Any, labels: Tensor, *_: Any, **options: Any) -> Tensor:
        if not isinstance(logits, LogitsNotMade):
            _refuse()
        shifted = options.get("shift_labels")
        return self._cross_entropy(
            logits.hidden,
            self._head.weight,
            labels if shifted is None else shifted.view_as(labels),
            bias=self._head.bias,
            shift=shifted is None,
            num_items=options.get("num_items_in_batch"),
            ignore_index=options.get("ignore_index", -100),
        )

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        had_labels, self._has_labels = self._has_labels, False
        if had_labels and isinstance(output, dict):  # Hugging Face's outputs are
            return type(output)(**{key: value for key, value in output.items() if not isinstance(value, LogitsNotMade)})
        if had_labels and isinstance(output, tuple):
            return tuple(value for value in output if not isinstance(value, LogitsNotMade))
        return output


def use_chunked_loss(model: nn.Module, *, chunk_tokens: int = CHUNK_TOKENS, liger: bool | None = None) -> ChunkedLoss:
    """Let a causal language model of Hugging Face compute its loss by :func:`offload.chunked_cross_entropy`.

    Where the model is given ``labels``, its output has the same ``loss`` and no ``logits``. Without labels nothing
    changes. What a trainer gives beside the labels, such as ``num_items_in_batch``, means what it means without this::

        with offload.use_chunked_loss(model):
            model(input_ids=tokens, labels=tokens).loss.backward()

    Args:
        model: The model, or PEFT's wrapper of one. Embeddings may be tied, and the head may be frozen or have a bias.
        chunk_tokens: How many tokens have logits at once.
        liger: As in :func:`offload.chunked_cross_entropy`.

    Returns:
        A handle with ``remove()``, which is also a context manager.

    Raises:
        TypeError: The model is none of these: its head is not an ``nn.Linear``, or its loss is another. One that
            changes its logits before the loss, as by a soft cap, raises it when it is called.
    """
    check_int("chunk_tokens", chunk_tokens, least=1)
    base: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT's wrapper has it
    head = getattr(base, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        raise TypeError(
            f"the head of {type(base).__name__} must be an nn.Linear, got {type(head).__name__}; call "
            "chunked_cross_entropy on what the model gives its head instead."
        )
    loss = getattr(getattr(base, "loss_function", None), "__name__", None)
    if loss != "ForCausalLMLoss":
        raise TypeError(
            f"the model's loss must be ForCausalLMLoss, got {loss}; remove() what has replaced it, or call "
            "chunked_cross_entropy on its hidden states instead."
        )
    return ChunkedLoss(base, head, chunk_tokens, liger=liger)


class LogitsNotMade:
    """What the head returns in place of logits: what they would be made of."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{_REMEDY} It asks for {name}.")


_REMEDY = (
    "the model must give its logits to its loss_function as they are, but it changes them before; call "
    "chunked_cross_entropy on its hidden states instead."
)


def _refuse(*_: object) -> NoReturn:
    raise TypeError(_REMEDY)


for _operation in ("add", "sub", "mul", "truediv", "getitem", "neg"):
    setattr(LogitsNotMade, f"__{_operation}__", _refuse)
