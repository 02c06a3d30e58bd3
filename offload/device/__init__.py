"""How, on the device's side: streams, events and copies, for accelerators and for the CPU; CUDA graphs under capture.

May import ``base``. Open ``backend.py`` first: the one interface that everything above uses.
"""
