"""Profiles, the link, what a step takes under policies, and the search for a plan. Pure data, no torch.

May import ``base``, ``schedule``, ``observe``, and ``recompute.costs``. Open ``plan.py`` first. ``region_costs.py`` has
what a layer costs if some regions are kept, and ``kinds.py`` which regions are worth it. ``layer_passes.py`` makes
forward and backward of a layer; ``simulate.py`` runs them, ``closed_form.py`` adds them up, and ``search.py`` tries.
"""
