"""Callbacks that offload a model's layers while a trainer trains it: Hugging Face's (and so TRL's), and Lightning's.

May import every other folder. The file of a trainer imports that trainer's package. Open ``base.py`` first.
"""
