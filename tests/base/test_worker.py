"""Threads beside the program: in order, not ended by errors, there again in a forked child."""

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from faults import in_threads, slowly
from models import build, step_gradients
from ranks import true_in_a_child

from offload import offload_layers
from offload.base.worker import Worker
from offload.device.select import get_backend


def test_an_error_is_kept_and_the_thread_goes_on() -> None:
    worker, errors, done = Worker("test"), list[BaseException](), list[int]()
    for number in range(4):
        worker.submit(lambda number=number: done.append(1 // (number % 2)), errors)
    worker.drain()
    assert done == [1, 1]
    assert [type(error) for error in errors] == [ZeroDivisionError] * 2


def test_an_idle_thread_holds_nothing_of_its_last_job() -> None:
    worker, tensor = Worker("test"), torch.ones(1)
    held = weakref.ref(tensor)
    worker.submit(partial(torch.neg, tensor), [])
    del tensor
    deadline = time.monotonic() + 10
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert held() is None


def test_jobs_of_two_threads_run_in_one() -> None:
    """Also the first ones, which start it."""
    worker, both, threads = Worker("test"), threading.Barrier(2), list[int]()

    def submit(number: int) -> None:
        both.wait(10)
        time.sleep(0.05 * number)
        sys.settrace(slowly(Worker._start))
        worker.submit(lambda: threads.append(threading.get_ident()), [])

    in_threads(partial(submit, 0), partial(submit, 1))
    worker.drain()
    assert len(threads) == 2
    assert len(set(threads)) == 1


def test_the_thread_goes_with_the_worker() -> None:
    worker, threads = Worker("test"), list[threading.Thread]()
    worker.submit(lambda: threads.append(threading.current_thread()), [])
    worker.drain()
    del worker
    threads[0].join(timeout=60)
    assert not threads[0].is_alive()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """OpenMP's other threads are not there after a fork, and it would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_makes_a_thread_of_its_own() -> None:
    """It has none of its parent's. CUDA cannot be used after a fork."""
    layers, x = build("gpt", 4, torch.device("cpu"))
    expected = step_gradients(layers, x)
    with offload_layers(layers, 2, min_bytes=0) as handle:
        step_gradients(layers, x)
        get_backend("cpu").synchronize()

        def is_right() -> bool:
            right = all(map(torch.equal, expected, step_gradients(layers, x)))
            return right and handle.stats().reloaded_bytes > 0

        assert true_in_a_child(is_right)
        assert is_right()
