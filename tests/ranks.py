"""The processes of a test that needs several: what starts them, what each of them does first and last, and forks."""

import faulthandler
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab import streams_of
from scripts import NO_GPU, run_scripts

from offload.device.select import get_backend
from offload.measuring import follow_plan

RANKS_S = {"cpu": 300, "cuda": 900}
"""So long may ranks take together: on the CPU they are over in half a minute, unless one waits for what never comes."""
COLLECTIVE_S = 120
"""So long does a rank wait for the others in a collective."""


def run_ranks(worker: Path, world: int, device: str, folder: Path) -> list[dict[Any, Any]]:
    """What each rank of ``python WORKER RANK WORLD_SIZE DEVICE FOLDER`` left in ``FOLDER/RANK.pt``."""
    tests = Path(__file__).resolve().parent
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = run_scripts(
        [[str(worker), str(rank), str(world), device, str(folder)] for rank in range(world)],
        folder,
        environment | (NO_GPU if device == "cpu" else {}),
        whole_end=False,
        timeout_s=RANKS_S[device],
    )
    assert [rank.code for rank in done] == [0] * world, "\n".join(rank.output for rank in done)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def ranks_of(worker: ModuleType) -> Any:
    """A fixture for a module's tests: what each of two ranks of the worker has found, on the CPU and on GPUs."""

    @pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu(n=2))])
    def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
        return run_ranks(Path(worker.__file__ or ""), 2, request.param, tmp_path_factory.mktemp("ranks"))

    return ranks


def be_rank(find: Callable[[int, int, torch.device], dict[Any, Any]], *, adverse: bool = False) -> None:
    """A worker's whole program: in the process group of all ranks, leave what ``find(rank, world, device)`` returns.

    If that is to be ``adverse``, copies of the CPU come late, and memory that was let go holds garbage.
    """
    rank, world, kind, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    follow_plan.measure_link = functools.cache(follow_plan.measure_link)  # as in the process of all other tests
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.cuda.set_device(device)
    backend = get_backend(device)
    backend.poison = adverse
    for stream in streams_of(backend) if adverse and kind == "cpu" else ():
        stream.delay_s = 0.0003
    with group(folder, rank, world, kind):
        found = find(rank, world, device)
        dist.barrier()
        torch.save(found, folder / f"{rank}.pt")


def true_in_a_child(condition: Callable[[], bool]) -> bool:
    """What a forked child says; a child that raises or hangs fails the test with its traceback."""
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
        said = 2
        try:
            said = int(not condition())
        finally:
            if error := sys.exception():
                traceback.print_exception(error, file=sys.__stderr__)
            os._exit(said)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"the child ended with {code}"
    return code == 0


@contextmanager
def group(folder: Path, rank: int = 0, world: int = 1, kind: str = "cpu") -> Iterator[None]:
    """A process group of these ranks, by default of this process alone."""
    store = dist.FileStore(str(folder / "store"), world)
    waits = timedelta(seconds=COLLECTIVE_S)  # for a rank that has left a collective out
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=waits)
    yield
    dist.destroy_process_group()
