"""Weights on the host, in device slots while their layer computes; gradients written back; steps beside backward.

A wing: may import the spine, no other wing. Open ``stream.py`` first.
"""
