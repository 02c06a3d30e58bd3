"""What happened: timelines, recorded or simulated, their pictures, and a memory meter.

A wing: may import the spine, no other wing. Open ``timeline.py`` first.
"""
