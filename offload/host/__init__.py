"""Host memory: page-locked memory, the pool that keeps it from step to step, and limits on it.

May import ``device`` and what is below. Open ``pool.py`` first: the pool hands out the buffers of ``buffers.py``, and
gets memory from ``page_locked.py``.
"""
