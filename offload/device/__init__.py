"""Streams, events and copies of one device, accelerator or CPU; CUDA graphs under capture.

May import ``base``. Open ``backend.py`` first: the interface that every other folder uses, for any accelerator.
``cuda.py`` and ``cpu.py`` implement it; ``select.py`` picks one.
"""
