"""What every room needs and that needs none of them: a layer's events, checks, units, warnings, trace marks, threads.

May import nothing of the library. Open ``layer_events.py`` first: when a layer begins and ends.
"""
