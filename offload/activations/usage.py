"""How a program uses its context: one warning for each habit that the schedule cannot work with.

All of them cost time or memory only. What is computed is right, so nothing else would say a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from offload.activations.round import Round
from offload.base.checks import warn_caller
from offload.base.torch_private import next_node, node_number
from offload.schedule.schedule import Schedule

MISSED = 2
"""So many outputs in a row that were not passed to the sync function: one may be a loop's last."""

WATCHED = 8
"""How many rounds are looked at for layers that read what the round before has made; steps are alike."""


class Usage:
    """What a context's program has done so far, and what it was told."""

    def __init__(self, model_layers: int) -> None:
        self._model_layers = model_layers
        self._first_node = 0
        """Number of the first node of the layer that runs."""
        self._waits_for_sync: int | None = None
        """The layer that ended last, if it has a backward and nobody has passed its output to sync."""
        self._missed = 0
        self._running = False
        """Whether the output of the layer that began last was not marked yet: that may be done more than once."""
        self._rounds = 0
        self._leaves: set[int] = set()
        """The parameters of the round's first layer."""
        self._returned: set[int] = set()
        """The numbers of the nodes that made the output of the layer that ended last."""
        self._said: set[str] = set()

    def forward_begins(self) -> None:
        """A layer's forward begins: the output of the one before should have been marked."""
        if self._waits_for_sync is not None:
            self._missed += 1
            if self._missed >= MISSED:
                self._say(
                    "sync",
                    f"the output of each layer must be passed to the sync function, but that of layer "
                    f"{self._waits_for_sync} was not, so that no reload starts before backward waits for it; write "
                    "`output = sync(output)` after the block of each layer.",
                )
        self._waits_for_sync = None
        self._first_node = next_node()
        self._running = True

    def forward_ended(self, layer: int, schedule: Schedule | None) -> None:
        """It has ended, and has made nodes if it has a backward."""
        if _moves(schedule) and next_node() > self._first_node:
            self._waits_for_sync = layer

    def synced(self, layer: int, microbatch: Round, nodes: Sequence[Any], *, counted: bool) -> None:
        """These nodes, which made a layer's output, were marked; the layer's number was ``counted``, or given."""
        self._waits_for_sync, self._missed = None, 0
        if self._running and nodes:
            self._running = False
            if self._rounds < WATCHED and _moves(microbatch.schedule):
                self._look(layer, microbatch, nodes, counted=counted)
            self._returned = {node_number(node) for node in nodes}

    def _look(self, layer: int, microbatch: Round, nodes: Sequence[Any], *, counted: bool) -> None:
        wanted = f"model_layers must be how often one forward enters the context, got {self._model_layers}"
        if len(microbatch.sets) == 1:
            self._rounds += 1
            self._leaves = self._leaves_of(nodes)
            read = (node for one in _nodes_from(nodes, self._first_node) for node, _ in one.next_functions)
            if all(node is None or node_number(node) not in self._returned for node in read):
                return
            if counted:
                self._say("order", f"{wanted}, but the layer after those reads what they return; pass their number.")
            else:
                self._say(
                    "order",
                    "layers must be listed in the order in which forward calls them, and be called once, but layer "
                    f"{layer} reads what itself or a later one returned; list them in that order, without those that "
                    "forward calls twice.",
                )
        elif counted and microbatch.runs_late(layer) and self._leaves & self._leaves_of(nodes):
            self._say(
                "order",
                f"{wanted}, but after {layer} of them backward ran and layer 0 came again; enter it around each layer, "
                "not around all of them, and pass their number.",
            )

    def _leaves_of(self, nodes: Sequence[Any]) -> set[int]:
        """The parameters of the layer that has ended."""
        return {id(node.variable) for node in _nodes_from(nodes, self._first_node) if hasattr(node, "variable")}

    def _say(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warn_caller(message)


def _moves(schedule: Schedule | None) -> bool:
    """Whether it says what moves: with a manual synchronizer, the program does."""
    return schedule is not None and bool(schedule.moves)


_MOST_NODES = 10_000
"""A layer has hundreds."""


def _nodes_from(nodes: Iterable[Any], first_node: int) -> Iterator[Any]:
    """These nodes and all nodes that backward reaches from them: those made from ``first_node`` on, and leaves."""
    waiting, seen = list(nodes), set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node not in seen and node_number(node) >= first_node:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions if before is not None]
