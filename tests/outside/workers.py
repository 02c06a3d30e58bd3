"""Runs cases in processes beside this one, so that a crash or a hang of one is a result like any other."""

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

Case = tuple[Any, ...]


def run_cases(
    function: str, cases: Iterable[Case], limit_s: float, processes: int = 1
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Call a function with each case, in processes of which each is replaced when it dies.

    Args:
        function: Its name in a module beside this one, ``"module.name"``; it returns a dataclass.
        cases: Positional arguments of each call, to be sent to the process.
        limit_s: A case that takes longer is given up.
        processes: How many run at a time.

    Yields:
        Each case, in order, with what became of it: the dataclass's fields and ``"seconds"``, or only ``"lost"``.
    """
    idle: SimpleQueue[_Worker | None] = SimpleQueue()
    for _ in range(processes):
        idle.put(None)

    def run(case: Case) -> tuple[Case, dict[str, Any]]:
        worker = idle.get()
        try:
            worker = worker or _Worker(function)
            result = worker.run(case, limit_s)
            if "lost" in result:
                worker.stop()
                worker = None
        finally:
            idle.put(worker)
        return case, result

    with ThreadPoolExecutor(processes) as threads:
        try:
            yield from threads.map(run, cases)
        finally:
            threads.shutdown(cancel_futures=True)
            for worker in [idle.get() for _ in range(processes)]:
                if worker is not None:
                    worker.stop()


class _Worker:
    def __init__(self, function: str) -> None:
        context = multiprocessing.get_context("forkserver")  # which imports PyTorch once
        context.set_forkserver_preload(["torch"])
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, function), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()  # it has imported what it needs; that is no case's time

    def run(self, case: Case, limit_s: float) -> dict[str, Any]:
        self._pipe.send(case)
        try:
            if self._pipe.poll(limit_s):
                result: dict[str, Any] = self._pipe.recv()
                return result
        except (EOFError, ConnectionError):
            self._process.join()
            return {"lost": f"the process died with exit code {self._process.exitcode}"}
        return {"lost": f"not done after {limit_s:.0f} s"}

    def stop(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, name: str) -> None:
    import torch

    torch.set_num_threads(1)
    # What the cases print is not for the program that asked.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123  # a device, no path
        module, function = name.rsplit(".", 1)
        call = getattr(importlib.import_module(f".{module}", __package__), function)
        pipe.send("ready")
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                case = pipe.recv()
                begin = time.perf_counter()
                try:
                    result = dataclasses.asdict(call(*case))
                except BaseException as error:  # noqa: BLE001  # the next process begins afresh
                    pipe.send({"lost": f"{type(error).__name__}: {str(error)[:300]}"})
                    return
                result["seconds"] = round(time.perf_counter() - begin, 2)
                pipe.send(result)
