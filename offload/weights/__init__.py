"""Weights on the host, in device slots while their layer computes; gradients written back; steps beside backward.

A wing: it may import the spine, no other wing. Open ``stream.py`` first: it turns the events of a layer into everything
else. ``streamed.py`` is what the user holds.

The way of one weight: ``layer.py`` moves it into flat page-locked memory and makes a stand-in over a device slot
(``parameter.py`` has both). When forward of its layer begins, ``stream.py`` has ``slots.py`` load the slot, if that was
not done ahead, and the modules hold the stand-in. Backward has the slot loaded again and computes the stand-in's
gradient; a node of the graph takes it off. When backward leaves the layer, ``reduce.py`` averages it over the ranks,
if there are several, and ``gradients.py`` copies it to the host, into what ``parameter.grad`` will be, or into staging,
from which a worker adds it. At the end of backward it is in ``parameter.grad``, for the optimizer; or the worker has
made the step before that (``step.py``). ``stats.py`` counts, and ``stay.py`` keeps layers where they are when the model
moves.
"""
