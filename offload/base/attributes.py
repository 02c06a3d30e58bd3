"""An attribute of one object, in place of its class's or of an earlier one, until that is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def replace_attribute(holder: object, name: str, value: object) -> Callable[[], None]:
    """Give one object an attribute of its own, in place of its class's or of an earlier one; returns what undoes it."""
    own = name in vars(holder)
    # No closure: a copy of the object copies this with it.
    undo = partial(setattr, holder, name, vars(holder)[name]) if own else partial(delattr, holder, name)
    setattr(holder, name, value)
    return undo


@contextmanager
def with_attribute(holder: object, name: str, value: object) -> Iterator[None]:
    """The same inside the block."""
    undo = replace_attribute(holder, name, value)
    try:
        yield
    finally:
        undo()


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: in place of what stands for it, in copies of a module."""
    return function
