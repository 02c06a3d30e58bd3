"""The command ``python -m offload plan``: how to train a model, by its config.

May import every folder but ``callbacks``; only ``offload/__main__.py`` imports this one. Open ``main.py`` first: it has
the options. ``plan.py`` answers, and ``count.py`` counts a model.
"""
