"""Weights on the host, in device slots while their layer computes; gradients written back; steps in backward.

A wing: it may import the spine, no other wing. Open ``stream.py`` first: it turns the events of a layer into loads
and write-backs. ``streamed.py`` is what the user calls and holds.

The way of one weight: ``layer.py`` moves it into flat pinned memory and makes a stand-in over a device slot
(``parameter.py`` has both). When forward of its layer begins, ``slots.py`` has loaded the slot, or loads it then, and
the modules hold the stand-in. Backward has the slot loaded again and computes the stand-in's gradient; a node of the
graph takes the gradient. When backward leaves the layer, ``reduce.py`` averages the gradient over the ranks, if there
are several, and ``gradients.py`` copies it to the host: into the tensor that ``parameter.grad`` will be, or into
staging, from which a worker adds it. The layer's optimizer may then step on the worker (``step.py``). ``stats.py``
counts.
"""
