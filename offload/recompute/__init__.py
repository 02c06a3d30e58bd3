"""Recompute what a layer has saved by running its forward again in backward, and hand over what was kept.

May import host, device, schedule and base. Open ``run_again.py`` first. ``learn.py`` notes what a forward does, once
for each kind of input. ``second_run.py`` finds which operations have to run again. ``prove.py`` compares the bits.
``state.py`` has the attributes and settings that both runs must see. ``policies.py`` says what is kept, offloaded or
recomputed.
"""
