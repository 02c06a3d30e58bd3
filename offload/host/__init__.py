"""Host memory: page-locked memory, the pool that keeps it from step to step, and limits on it.

May import ``device`` and what is below. Open ``pool.py`` first.
"""
