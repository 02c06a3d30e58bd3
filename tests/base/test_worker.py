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
from lab import late_copies
from models import build, loss_of, offloading, step_gradients
from ranks import true_in_a_child

from offload.base.worker import Worker

CPU = torch.device("cpu")


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
class TestFork:
    """A child has no threads of its parent's; it makes its own. CUDA cannot be used after a fork."""

    @pytest.fixture(autouse=True)
    def slow_copies(self) -> Iterator[None]:
        with late_copies(0.002):
            yield

    def test_what_was_queued_is_done_before_the_fork(self) -> None:
        worker, done = Worker("test"), list[str]()
        worker.submit(lambda: (time.sleep(0.05), done.append("parent")), [])

        def goes_on() -> bool:
            there = list(done)
            worker.submit(lambda: done.append("child"), [])
            worker.drain()
            return there == ["parent"] and done == ["parent", "child"]

        assert true_in_a_child(goes_on)
        assert done == ["parent"]

    def test_another_thread_is_about_to_start_the_worker(self) -> None:
        """And holds its lock, which the child's copy of that thread never gives back."""
        worker, done = Worker("test"), list[str]()

        def submit(where: str) -> None:
            worker.submit(lambda: done.append(where), [])

        def start() -> None:
            sys.settrace(slowly(Worker._start, seconds=0.1))
            submit("parent")

        def goes_on() -> bool:
            submit("child")
            worker.drain()
            return done == ["child"]

        starting = threading.Thread(target=start, daemon=True)
        starting.start()
        time.sleep(0.25)
        assert not done
        assert true_in_a_child(goes_on)
        starting.join(10)
        worker.drain()
        assert done == ["parent"]

    def test_a_graph_from_before_the_fork(self) -> None:
        """What its parent has on the host, the child has too."""
        layers, x = build("gpt", 4, CPU)
        expected, offloaded = step_gradients(layers, x), offloading(2, 4, CPU)
        leaves = [x, *layers.parameters()]
        torch.manual_seed(1)
        loss = loss_of(offloaded.forward(layers, x))

        def is_right() -> bool:
            return all(map(torch.equal, expected, torch.autograd.grad(loss, leaves)))

        assert true_in_a_child(is_right)
        assert is_right()
