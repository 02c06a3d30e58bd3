"""What moves, and who says so: the way of a saved tensor to the host and back.

May import ``recompute`` and what is below, and no wing. Open ``activation_set.py`` first, then
``context.py``, which turns a program's events into points of the schedule.
"""
