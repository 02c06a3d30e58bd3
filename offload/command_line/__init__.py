"""Questions that a shell can ask: how fast is the link, what is wrong with this machine, what to do with a model.

A wing: may import the spine, ``planning`` and ``observe``. Nothing imports it but ``offload/__main__.py``, so that
``import offload`` does not. Open ``main.py`` first: it lists the commands. The file of each says which options it has
and makes an ``answer.py``. ``pcie.py`` and ``machine.py`` read what the system says about itself, which
``checks.py`` judges. ``llama.py`` counts a model's profile from its ``shape.py``, and ``ways.py`` plans with that.
"""
