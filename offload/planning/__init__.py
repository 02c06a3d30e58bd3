"""Profiles, the link, what a step takes under policies, and the search for a plan. Pure data, no torch.

May import ``base``, ``schedule``, ``observe``, and ``recompute.costs``. Open ``plan.py`` first. ``layer_costs.py`` has
the cost of a layer under a policy; ``simulate.py`` runs a step, and ``search.py`` tries.
"""
