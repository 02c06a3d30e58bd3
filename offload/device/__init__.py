"""How, on the device's side: streams, events and copies, for accelerators and for the CPU; CUDA graphs under capture.

May import ``base``, and knows nothing of what is copied. Open ``backend.py`` first: the one interface that everything
above uses, as any accelerator has it. ``cuda.py`` and ``cpu.py`` build on it; ``select.py`` picks one.
"""
