"""Callbacks that offload a model's layers while a trainer trains it: Hugging Face's (and so TRL's), and Lightning's.

A wing on top of all others: may import the spine and every wing. Each trainer has a file of its own, which imports
that trainer's package; nothing else of the library does, and ``import offload`` does not import this room. Open
``base.py`` first.
"""
