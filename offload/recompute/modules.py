"""Which submodule of a layer computes now."""

from __future__ import annotations

import sys

from torch import nn

from offload.base.torch_private import MODULE_CALL


class ModuleNames:
    """The qualified names of a layer's submodules.

    Which of them computes is read from the interpreter's stack. Hooks would say it as well, but make the compiler
    compile what is in the layer in another way, with other bits.

    Args:
        layer: The layer; ``None`` has no names.
    """

    def __init__(self, layer: nn.Module | None) -> None:
        self._names = {} if layer is None else {id(module): name for name, module in layer.named_modules()}

    def current(self) -> str:
        """That of the innermost submodule that computes; empty for the layer itself."""
        frame = sys._getframe(1) if self._names else None
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                name: str | None = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back
        return ""
