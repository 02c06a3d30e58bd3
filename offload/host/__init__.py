"""How, on the host's side: page-locked memory, the pool that keeps it from step to step, and its limits.

May import ``device`` and what is below. Open ``pool.py`` first.
"""
