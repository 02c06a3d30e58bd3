"""Optimizer state in host memory, stepped on the device in chunks.

May import every folder below it in the map of the source, and no other. Open ``stream.py`` first: the call, its handle
and the hooks on the optimizer. ``chunks.py`` steps one chunk after the other; ``state.py`` holds the state on the host;
``proof.py`` finds out how an optimizer may be split.
"""
