"""The commands of ``python -m offload``: how fast the link is, what is wrong with a machine, how to train a model.

May import every folder but ``callbacks``; only ``offload/__main__.py`` imports this one. Open ``main.py`` first: it has
the options of all commands. ``machine.py`` and ``plan.py`` answer them, and ``llama.py`` counts a model.
"""
