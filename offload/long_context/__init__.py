"""What a long sequence needs beside offloading: the loss without its logits, and MLPs in tiles of tokens.

A wing beside the others: may import ``base/`` and ``recompute/``, and nothing of the rest knows of it. It is plain
PyTorch, and changes no parameter's name. Open ``tile_by_tile.py`` first: there is no other.
"""
