"""Skips tests that need more GPUs than the machine has; gives the others their device.

PyTorch is imported where tests run: the process that hands them out to others would start those seconds later.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch
    from lab import Lab

# Read when CUDA starts: cuBLAS adds in the same order each time only with a workspace of fixed size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# What samples are drawn with: another one in each run, the same in all processes of a run.
os.environ.setdefault("OUTSIDE_SEED", str(int.from_bytes(os.urandom(3))))


def pytest_report_header() -> str:
    return f"OUTSIDE_SEED={os.environ['OUTSIDE_SEED']} repeats what is drawn: cases of tests, and samples in them"


# What is imported until all tests are collected stays; to look through it again and again takes a second.
gc.disable()
# Half of what looking through costs afterwards would be for the 700 newest objects.
gc.set_threshold(10_000)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    try:
        return (yield)
    finally:
        gc.enable()


# A busy machine is no fault of the code.
settings.register_profile("any machine", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few examples", settings.get_profile("any machine"), max_examples=10)
settings.load_profile("any machine")


# By how long they take, the longest first: processes that run side by side then end at about the same time. All others
# take less than ten seconds.
LONG_FILES = (
    "test_docs.py",
    "test_examples.py",
    "test_budget.py",
    "test_operations.py",
    "test_prepare.py",
    "test_browser.py",
    "test_compiled_budget.py",
    "test_results.py",
    "test_planner.py",
    "test_huggingface.py",
    "test_benchmarks.py",
    "test_notebooks.py",
    "test_same_bits.py",
    "test_in_pieces.py",
    "test_count.py",
    "test_policies.py",
    "test_recipes.py",
    "test_longer_inputs.py",
    "test_no_recipe_fits.py",
    "test_compiled.py",
    "test_second_run.py",
    "test_plan_command.py",
)


FORKED = (
    "test_docs.py",
    "test_examples.py",
    "test_subclasses.py",
    "test_pipelining.py",
    "test_data_parallel.py",
    "test_data_parallel_policies.py",
    "test_on_two_ranks.py",
    "test_types.py",
)
"""Whose scripts are forked from a process that has imported PyTorch and the trainers: one, as one worker runs them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """As ``--dist loadfile`` does, but for files that belong together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "forked" if file.endswith(FORKED) else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: some of them wait, for a browser, a late copy, or what they have started."""
    return 1 + len(os.sched_getaffinity(0))


WHOLLY_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out whole files that are slow, whose imports alone take seconds, if slow tests are not asked for."""
    if "not slow" not in config.option.markexpr or not collection_path.match("test_*.py"):
        return None
    return WHOLLY_SLOW.search(collection_path.read_text("utf-8")) is not None or None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at what is marked as nightly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    families: defaultdict[tuple[str, bool, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("drawn")
        if marker and not item.get_closest_marker("nightly"):
            families[item.nodeid.partition("[")[0], _gpus_needed(item) > 0, *marker.args].append(item)
    for (name, _, most), cases in families.items():
        random.Random(f"{os.environ['OUTSIDE_SEED']} {name}").shuffle(cases)
        for not_drawn in cases[most:]:
            not_drawn.add_marker(pytest.mark.nightly)
    rank = {name: index for index, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


FAST_S = [120]
"""So long may a fast test take, which ends in a second or never: on a busy machine, too. Where one has hung, others may
hang as well, and get less."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "Failed: Timeout" in str(report.longrepr):
        FAST_S[0] = 10


def _gpus_needed(item: pytest.Item) -> int:
    needed = [1 for _ in item.iter_markers("gpu")]
    needed += [marker.kwargs.get("n", 2) for marker in item.iter_markers("multigpu")]
    return max(needed, default=0)


@functools.cache
def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = _gpus_needed(item)
    if needed > (there := _gpus()):
        pytest.skip(f"needs {needed} CUDA device(s), found {there}")


@contextmanager
def turn_on_gpu(*, alone: bool) -> Iterator[None]:
    """Wait until this process may use the GPU: together with others, or as the only one."""
    path = Path(tempfile.gettempdir()) / f"offload_tests_{os.getuid()}"
    with path.with_suffix(".gate").open("a") as gate, path.with_suffix(".gpu").open("a") as gpu:
        # Who wants to be alone keeps the gate shut while it waits. Without that, new ones could pass it for ever.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)  # Around what counts a test's time, as it may have to wait.
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Where workers run GPU tests side by side, those marked ``alone`` wait for the others, and the others for them."""
    if not any(map(item.get_closest_marker, ("slow", "nightly", "gpu", "multigpu", "timeout"))):
        item.add_marker(pytest.mark.timeout(FAST_S[0]))
    if not 0 < _gpus_needed(item) <= _gpus():
        return (yield)
    with turn_on_gpu(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def begun() -> None:
    """What each process that runs tests does once."""
    import torch

    from offload.measuring import follow_plan

    # Budgets measure the link of a device once in a run: each time takes a third of a second on the CPU.
    follow_plan.measure_link = functools.cache(follow_plan.measure_link)
    # For a GPU that is not there, PyTorch notes with each seed where in the program that was: a millisecond each time.
    if not torch.accelerator.is_available():
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda _: None
    # Autograd's first backward decides whether devices need threads, which a forked child cannot have. Fake tensors
    # pretend that there is a GPU: a process whose first test uses some would have such threads.
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True, scope="module")
def nothing_old_to_look_through() -> None:
    """What tests import stays: without it in the way, a test's own garbage is collected at once."""
    gc.collect()
    gc.freeze()


@functools.cache
def _first_products() -> None:
    """With the first products in each thread, cuBLAS takes 32 MiB or more, which would count in a test's budget."""
    import torch

    linear = torch.nn.Linear(32, 32, device="cuda")
    (linear(torch.ones(32, 32, device="cuda")) @ linear.weight).sum().backward()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device that the library has a backend for; kernels give the same bits each time."""
    import torch

    from offload.device.select import resolve_device

    if request.param == "cpu":
        yield torch.device("cpu")
        return
    _first_products()
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would fill new memory; the library must be right without.
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield resolve_device(request.param)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def lab(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """The device with a host pool of its own, and the means to disturb it."""
    from lab import Lab

    from offload.device.select import get_backend
    from offload.host import pool as host_pool

    monkeypatch.setattr(host_pool, "_pools", {})
    backend = get_backend(device)
    made = Lab(backend, monkeypatch)
    yield made
    made.slow()
    backend.poison = False
    made.drain()


@pytest.fixture
def adverse(lab: Lab) -> None:
    """Copies come late, and memory that is freed or new holds garbage: for whole files of tests."""
    lab.adverse()
