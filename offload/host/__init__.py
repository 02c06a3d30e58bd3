"""How, on the host's side: page-locked memory, the pool that keeps it from step to step, and its limits.

May import ``device`` and what is below. Open ``pool.py`` first: it hands out what ``buffers.py`` describes, and gets
more from ``page_locked.py``, if the system has any left. ``limits.py`` is what users say about it.
"""
