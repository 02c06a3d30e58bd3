"""Timelines, recorded or simulated, their pictures, and a memory meter.

May import ``base``, ``schedule`` and ``device``. Open ``timeline.py`` first.
"""
