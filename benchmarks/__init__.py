"""Measurements; see each module's own text for its command."""

import os

# Read when CUDA starts: cuBLAS adds in the same order each time only with a workspace of fixed size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
