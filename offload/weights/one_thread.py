"""Refuses a second thread that uses streamed layers while one does.

Two threads would take turns in the same device memory, and each would compute with the other's weights.
"""

from __future__ import annotations

import threading


class OneThread:
    """The thread that is in a layer's forward or in a backward, if there is one."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._what = ""
        self._changing = threading.Lock()  # two threads may enter at the same moment

    def enter(self, what: str, thread: int | None) -> None:
        """Let a thread be the user until :meth:`leave`.

        Args:
            what: What it is about to do, for messages.
            thread: Its number; ``None`` where autograd does not tell for whom it works.

        Raises:
            RuntimeError: Another thread is.
        """
        if thread is None:
            return
        with self._changing:
            if self._thread not in (None, thread) and _name_of(self._thread) is not None:
                raise RuntimeError(
                    "streamed layers must be used by one thread at a time, but "
                    f"{_name_of(thread) or 'a thread'} begins {what} while {_name_of(self._thread)} is in "
                    f"{self._what}; hold a lock from forward to the end of backward, or give each thread a model "
                    "of its own."
                )
            self._thread, self._what = thread, what

    def leave(self) -> None:
        """There is no user any more."""
        self._thread = None

    def is_thread(self, thread: int) -> bool:
        """Whether this thread is the user."""
        return self._thread == thread


def _name_of(thread: int | None) -> str | None:
    """The thread's name, or ``None`` if it has ended, in the middle of what it did."""
    return next((one.name for one in threading.enumerate() if one.ident == thread), None)
