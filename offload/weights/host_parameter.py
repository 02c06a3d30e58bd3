"""One of the user's parameters, in pinned host memory, and the sum that its ``grad`` becomes.

A :class:`HostParameter` is shared by all layers that hold the parameter. What stands in for it on the device is made
in :mod:`offload.weights.stand_in`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.device.backend import owners

ALIGNMENT_BYTES = 256
"""Where a parameter may start in flat memory: what CUDA's own allocator guarantees, at least."""


class HostParameter:
    """One of the user's parameters, whose data moves into ``flat``.

    Args:
        parameter: The user's.
        name: For messages, such as ``layer 3's mlp.up.weight``.
        flat: Pinned, uint8, of the parameter's size.
    """

    def __init__(self, parameter: nn.Parameter, name: str, flat: torch.Tensor) -> None:
        self.parameter = parameter
        self.name = name
        self.flat = flat
        self.nbytes = nbytes_of(parameter)
        """Bytes of the values."""
        self.size = parameter.size()
        self.stride = torch.empty_like(parameter, device="meta").stride()
        """The parameter's order of dimensions, without gaps."""
        self.accumulator: Any = None
        """Autograd's node that adds to ``parameter.grad``."""
        self.shared = False
        """Whether one backward may bring several gradients: several layers use it, or the loss does by itself."""
        self.held = False
        """Whether :attr:`total` stands for ``parameter.grad``: from the first gradient of a backward to its end."""
        self.total: torch.Tensor | None = None
        """What ``parameter.grad`` will be, while it is held."""
        self.from_nothing = False
        """Whether ``parameter.grad`` was ``None`` when it was last held."""
        self.apart: torch.Tensor | None = None
        """The sum of several gradients of this backward, to be added to :attr:`total`."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        """Where ``parameter.grad`` lies, kept from step to step: page-locking stops the device."""
        gradient, parameter.grad = parameter.grad, None
        data = self.over(own_storage(flat), parameter.dtype)
        data.copy_(parameter.data)
        parameter.data = data
        parameter.grad = None if gradient is None else gradient.to("cpu")
        self._address = data.data_ptr()

    def over(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the parameter's geometry over the first bytes of ``flat``, with a version of its own."""
        view = torch.empty(0, dtype=dtype, device=flat.device)
        offset = flat.storage_offset() // dtype.itemsize
        return view.set_(flat.untyped_storage(), offset, self.size, self.stride)

    def check(self) -> None:
        """Raise if the data is no longer in the memory that is copied.

        Raises:
            RuntimeError: Something has replaced ``parameter.data``.
        """
        if self.parameter.data_ptr() != self._address:
            raise RuntimeError(
                f"{self.name} must stay in the host memory that stream_weights gave it, but its data was replaced "
                "(by .to(), .cuda() or .half() for example); call remove(), move the model, then stream again."
            )

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What ``parameter.grad`` is made of."""
        return self.parameter.grad_dtype or self.parameter.dtype

    def use_gradient_dtype(self, dtype: torch.dtype) -> None:
        """Keep ``parameter.grad`` in ``dtype`` if that is more precise than the parameter."""
        parameter = self.parameter
        if parameter.is_floating_point() and parameter.element_size() < dtype.itemsize:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype)

    def has_hooks(self) -> bool:
        """Whether hooks of the user's wait for a gradient."""
        return bool(self.parameter._backward_hooks or self.parameter._post_accumulate_grad_hooks)

    def hold_gradient(self) -> None:
        """Let :attr:`total` stand for ``parameter.grad``, now that the first gradient of a backward is there.

        Copies and the worker write to :attr:`total` while backward goes on. Autograd finds ``None`` meanwhile, so it
        makes a tensor of its own for what comes from outside the layers: the loss may use a parameter by itself.
        """
        if not self.held:
            self.total = self.parameter.grad
            self.from_nothing = self.total is None
            self.held = True
            self.parameter.grad = None  # last: an interrupt before leaves the gradient where it is

    def give_back_gradient(self) -> None:
        """All has arrived: let ``parameter.grad`` be the sum.

        Autograd must not add to ``parameter.grad`` meanwhile: backward has ended, or the parameter's step in backward
        sees to it (:meth:`offload.weights.step.LayerSteps.step`).
        """
        if not self.held:
            return
        total, apart, outside = self.total, self.apart, self.parameter.grad
        if outside is not None and outside is not total:
            self.shared = True  # from now on, the sum of one backward is made before it is added
            apart = outside if apart is None else apart + outside
        if total is None:
            total = apart
        elif apart is not None:
            total.add_(apart)
        self.parameter.grad = total
        self.total = self.apart = None
        self.held = False

    def lacks_memory(self) -> bool:
        """Whether there is no memory for a gradient, or somebody still looks into the last one."""
        # Once the user has let go of parameter.grad and all its views, the tensor kept here is the only owner.
        return self._memory.dtype is not self.gradient_dtype or owners(self._memory) > 1

    def keep_memory(self, flat: torch.Tensor) -> None:
        """Keep ``flat`` as the memory for gradients."""
        self._memory = self.over(own_storage(flat), self.gradient_dtype)

    def give_memory(self) -> torch.Tensor:
        """A new tensor for ``parameter.grad`` over the memory for it, whose values are whatever is there."""
        return self._memory.data  # .data: with a version of its own


def nbytes_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of the tensor's values, if they were of ``dtype``."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def aligned(nbytes: int) -> int:
    """``nbytes`` and the gap up to where the next parameter may start."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, uint8, as a tensor with a storage of just its bytes, which keeps that of ``flat`` alive.

    So ``torch.save`` of one parameter writes that parameter, not the flat memory of its layer.
    """
    if not len(flat):
        return flat.clone()
    own: torch.Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(flat))  # type: ignore[attr-defined]  # public
    return own
