"""What a long sequence needs beside offloading: the loss without its logits, and MLPs in tiles of tokens.

A wing beside the others: may import ``base/``, and nothing of the rest knows of it. Both are plain PyTorch, and change
no parameter's name. Open ``chunked_loss.py`` first.
"""
