"""When each layer's activations are released and reloaded in forward and backward. Pure data, no torch.

May import ``base``. Open ``schedule.py`` first.
"""
