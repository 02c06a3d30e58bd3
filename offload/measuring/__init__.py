"""Measure a machine and a model: the link, the layers, their regions; and follow a plan made of that.

The only code that runs a model to learn something. ``planning`` works on the plain data that comes out of here.
May import ``planning`` and what is below it. Open ``follow_plan.py`` first.
"""
