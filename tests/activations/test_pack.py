"""The way of a saved tensor through the library, in a layer with policies: few calls, and few files."""

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from models import build, loss_of, through

import offload

ROOT = str(Path(offload.__file__).parent)
MOST_CALLS, MOST_FILES = 8, 3


def in_library(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(ROOT)


def test_a_saved_tensor_takes_few_calls_and_files() -> None:
    layers, x = build("decoder", 4, torch.device("cpu"))
    policies = {"*dot_product*": "offload", "*mm*": "keep", "*": "recompute"}
    taken: defaultdict[int, list[str]] = defaultdict(list)
    """Files of the calls that each handle took, by its identity; ``held`` keeps them all."""
    held: list[Any] = []
    at_work: list[tuple[FrameType, list[str]]] = []

    def look(frame: FrameType, event: str, result: object) -> None:
        if event == "call" and in_library(frame):
            if not at_work and not in_library(frame.f_back):
                at_work.append((frame, []))
            if at_work:
                at_work[0][1].append(frame.f_code.co_filename)
        elif event == "return" and at_work and at_work[0][0] is frame:
            _, files = at_work.pop()
            handle = frame.f_locals["self"] if frame.f_code.co_name == "unpack" else result
            if type(handle).__name__.endswith("Handle"):
                held.append(handle)
                taken[id(handle)] += files

    def step() -> None:
        loss_of(through(layers, x)).backward()

    with offload.offload_layers(layers, 2, policies=policies, min_bytes=1, device="cpu"):
        for _ in range(3):
            step()
        sys.setprofile(look)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert len(taken) > 20 * len(layers)
    assert {"KeptHandle", "MovedHandle", "DroppedHandle"} <= {type(handle).__name__ for handle in held}
    assert statistics.median(map(len, taken.values())) <= MOST_CALLS
    assert statistics.median(len(set(files)) for files in taken.values()) <= MOST_FILES
