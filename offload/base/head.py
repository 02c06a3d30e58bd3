"""Which of an optimizer's parameters is a model's head, for steps and for plans. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Sequence


def number_of_head(state: Sequence[int], slot_bytes: int) -> int | None:
    """Which parameter's gradient backward sets aside on the host, of those with so much ``state``, in their order.

    The last whose state is larger than all slots: it takes longer to be loaded than the next layer to be recomputed.
    Not the first, which backward comes to at its end.
    """
    return next((number for number in range(len(state) - 1, 0, -1) if state[number] > slot_bytes), None)
