"""How much: the link, what layers cost, a simulator, and plans. Pure data, ``measure`` aside, which runs a model.

A wing: may import the spine and ``observe``. Open ``plan.py`` first.
"""
