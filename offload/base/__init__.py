"""What every room needs and that needs none of them: warnings, units, trace marks, threads, a layer's events.

May import nothing of the library. Open ``layer_events.py`` first: when a layer begins and ends.
"""
