"""The pipeline benchmark, with each storage moved by itself: at its small sizes one pack would hold all of a part."""

from benchmarks import pipeline
from offload import packing

packing.SMALL_BYTES = 0
pipeline.main()
