"""The commands of ``python -m offload``: what is wrong with a machine, and how to train a model.

May import every folder but ``callbacks``; only ``offload/__main__.py`` imports this one. Open ``main.py`` first: it has
the options of all commands. ``machine.py`` and ``plan.py`` answer them, and ``count.py`` counts a model.
"""
