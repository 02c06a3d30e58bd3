"""The order of forwards and backwards that one pipeline rank runs, in the notation of ``torch.distributed.pipelining``.

``2F0`` is the forward of microbatch 0 on stage 2, and ``2B0`` the backward. Schedules without bubbles run a backward in
two halves, for the inputs (``I``) and for the weights (``W``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from offload.base.checks import check_type

ACTION_KINDS = ("F", "B", "I", "W")

_ACTION = re.compile(r"(\d+)([A-Z_]+)(\d*)")


class Chunk(NamedTuple):
    """One microbatch on one stage."""

    stage: int
    microbatch: int


class Action(NamedTuple):
    """One chunk's forward, backward, or half of a backward."""

    stage: int
    kind: str
    """``"F"``, ``"B"``, ``"I"`` or ``"W"``."""
    microbatch: int

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.stage, self.microbatch)

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def read_actions(actions: Iterable[Any]) -> tuple[Action, ...]:
    """The forwards and backwards of one rank, in order, of what :func:`plan_pipeline` takes.

    Communication, and ``None`` for a bubble, are left out. A ``ValueError`` is raised if a text is no action, or a
    chunk does not run forward once, and then backward once.
    """
    check_type("actions", actions, Iterable, 'the actions of a rank in order, such as ["0F0", "0F1", "0B0", "0B1"]')
    found = tuple(_read_all(actions))
    ran: dict[Chunk, str] = {}
    for action in found:
        ran[action.chunk] = ran.get(action.chunk, "") + action.kind
    for chunk, kinds in ran.items():
        if kinds not in ("FB", "FIW"):
            raise ValueError(
                f"microbatch {chunk.microbatch} on stage {chunk.stage} must run F and then B, or F, I and then W, "
                f"got {', '.join(kinds)}; give the actions of one rank in one step"
            )
    return found


def without_idle_inputs(actions: Sequence[Action], stage: int) -> tuple[Action, ...]:
    """The actions of a ``stage`` whose input needs no gradient: PyTorch runs its whole backward in ``W``."""
    split = {action.chunk for action in actions if action.kind == "I" and action.stage == stage}
    return tuple(
        action._replace(kind="B") if action.chunk in split and action.kind == "W" else action
        for action in actions
        if action.chunk not in split or action.kind != "I"
    )


def number_chunks(actions: Iterable[Action]) -> dict[Chunk, int]:
    """Each chunk's number in the order of forwards."""
    forwards = [action.chunk for action in actions if action.kind == "F"]
    return {chunk: number for number, chunk in enumerate(forwards)}


def _read_all(actions: Iterable[Any]) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        text = action if isinstance(action, str) else repr(action)  # PyTorch's actions say what they are, as ours do
        for part in text.strip().removeprefix("(").partition(")")[0].split(";"):
            match = _ACTION.fullmatch(part.strip())
            if match is None or (match[2] in ACTION_KINDS and not match[3]):
                raise ValueError(f"an action must be written <stage>F<microbatch>, or with B, I or W, got {text!r}")
            if match[2] in ACTION_KINDS:
                yield Action(int(match[1]), match[2], int(match[3]))
