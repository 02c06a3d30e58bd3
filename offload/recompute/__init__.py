"""What is computed again: the operations of a layer's forward, written down, and run once more when backward asks.

Of the spine: it may import host, device, schedule and base. Open ``recorder.py`` first: it sees each operation. What it
writes down is in ``record.py``, and runs there again. ``kinds.py`` knows which operations can, ``policies.py`` what a
user wants of them, and ``proof.py`` tries all of it out in a layer's first forward. ``costs.py`` is for planners.
"""
