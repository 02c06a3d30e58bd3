"""Weights in host memory, loaded while their layer computes; gradients written back; optimizer steps in backward.

May import every folder below it in the map of the source, and no other. Open ``stream.py`` first: it follows a layer's
forward and backward, and says what the other files do then. ``streamed.py`` has what the user calls and holds.
"""
