"""Which submodule of a layer computes now."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class CurrentModule(AbstractContextManager["CurrentModule"]):
    """Follows the forward of a layer's submodules, while entered.

    Args:
        layer: The layer; ``None`` follows nothing.
    """

    def __init__(self, layer: nn.Module | None) -> None:
        self._names = {} if layer is None else {id(module): name for name, module in layer.named_modules()}
        self._open: list[str] = []
        self._hooks: list[Any] = []

    @property
    def name(self) -> str:
        """The qualified name of the innermost submodule that computes; empty for the layer itself."""
        return self._open[-1] if self._open else ""

    def __enter__(self) -> CurrentModule:
        if self._names:
            self._hooks = [
                register_module_forward_pre_hook(self._begin),
                register_module_forward_hook(self._end, always_call=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._open.append(self._names.get(id(module), self.name))

    def _end(self, *_: Any) -> None:
        del self._open[-1:]
