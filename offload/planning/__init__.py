"""How much: the link, what layers cost, a simulator, and plans. Pure data, but for what measures.

A wing: may import the spine and ``observe``. Open ``plan.py`` first. For plans by region, ``ladder.py`` has the ways to
treat each kind of layer, ``choices.py`` what may be chosen, and ``search.py`` chooses. Layers are played in pieces,
as in ``passes.py``, or added up by ``estimate.py``.
"""
