"""Questions that a shell can ask: how fast is the link, what is wrong with this machine, what to do with a model.

A wing: may import the spine, ``planning`` and ``observe``. Nothing imports it but ``offload/__main__.py``, so that
``import offload`` does not. Open ``main.py`` first: it lists the commands. The file of each has its options and its
answer, which ``terminal.py`` reads and lays out. ``machine.py`` reads what the system says about itself. ``llama.py``
counts a model's profile from its sizes, and ``plan.py`` plans with that.
"""
