"""When: which layer's activations leave and come back at which point of forward and backward. Pure data, no torch.

May import ``base``. Open ``schedule.py`` first.
"""
