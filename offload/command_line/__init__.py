"""The command ``python -m offload plan``: how to train a model, by its config.

May import every folder but ``callbacks``. Open ``main.py`` first; ``count.py`` counts a model.
"""
