"""Streams, events and copies of one device, accelerator or CPU; CUDA graphs under capture.

May import ``base``. Open ``backend.py`` first: the interface, for any accelerator; ``cuda.py`` and ``cpu.py`` differ.
"""
