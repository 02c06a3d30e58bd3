"""Timelines, recorded or simulated, their pictures, and a memory meter.

May import ``recompute`` and what is below. Open ``timeline.py`` first.
"""
