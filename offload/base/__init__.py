"""Shared by all folders: layer events, checks, units, warnings, trace marks, threads, and PyTorch's private names.

May import nothing of the library. Open ``layer_events.py`` first: when a layer begins and ends.
"""
