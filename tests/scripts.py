"""Runs Python scripts in processes of their own, without importing PyTorch in each of them.

``run_scripts`` forks them from a process that has done nothing but import what it was told to. A fork becomes the
script: it has the script's arguments, folder, variables and warnings, ``__main__`` is the script's, and it ends as the
interpreter ends. A process that may use a GPU is started afresh: CUDA reads its variables only once.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
# What is imported for the first time is compiled, and some packages have escapes that Python warns of.
STRICT = ["-W", "error", "-W", "ignore::SyntaxWarning", "-W", "ignore:invalid escape sequence:DeprecationWarning"]


TORCH = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "matplotlib.figure",
    "pytest",
    "offload",
)
"""What training in several processes imports in any case, and much of it any optimizer; what compiles, what draws, and
what tests.

The library itself, last: each of fifty scripts would read it anew, and make objects of all its code.
"""
TRAINERS = ("transformers.models.llama.modeling_llama", "transformers.trainer", "trl.trainer.sft_trainer", "lightning")
"""What trainers bring, beside that."""


class Done(NamedTuple):
    code: int
    output: str
    """What it printed, and what it wrote to its error stream."""


def run_scripts(
    scripts: Sequence[Sequence[str]],
    folder: Path,
    environment: Mapping[str, str] | Sequence[Mapping[str, str]],
    *,
    imported: Sequence[str] = TORCH,
    strict: bool = False,
    whole_end: bool = True,
    timeout_s: float = 900,
) -> list[Done]:
    """Run scripts beside each other, and wait for all.

    Args:
        scripts: Each one's path and arguments.
        folder: Where they run.
        environment: All their variables, or those of each. Scripts that see no GPU are forked.
        imported: Modules that a fork has imported already.
        strict: Whether a warning is an error, such as while those modules are imported.
        whole_end: Whether a fork that has run through also takes apart what it has imported, for a third of a second.
        timeout_s: Scripts that take longer are killed.
    """
    environments = [environment] * len(scripts) if isinstance(environment, Mapping) else environment
    with tempfile.TemporaryDirectory() as outputs:
        request = [
            {
                "script": [str(Path(script[0]).resolve()), *script[1:]],
                "folder": str(folder),
                "environment": dict(variables),
                "output": str(Path(outputs, str(number))),
                "strict": strict,
                "whole_end": whole_end,
            }
            for number, (script, variables) in enumerate(zip(scripts, environments, strict=True))
        ]
        if all(variables.get("CUDA_VISIBLE_DEVICES") == "" for variables in environments):
            codes = _nursery.run(imported, request, timeout_s)
        else:
            codes = _run_afresh(request, timeout_s)
        return [Done(code, Path(one["output"]).read_text("utf-8")) for code, one in zip(codes, request, strict=True)]


def as_torchrun(environment: Mapping[str, str], ranks: int) -> list[dict[str, str]]:
    """The variables of each rank, as torchrun sets them on one machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    same = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [{**environment, **same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _run_afresh(request: list[dict[str, Any]], timeout_s: float) -> list[int]:
    started = []
    try:
        for one in request:
            command = [sys.executable, *(STRICT if one["strict"] else []), *one["script"]]
            with Path(one["output"]).open("w") as output:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                started.append(subprocess.Popen(command, cwd=one["folder"], env=one["environment"], **streams))
        return [process.wait(timeout_s) for process in started]
    finally:
        for process in started:
            process.kill()


class _Nursery:
    """The process that scripts are forked from; started again when it had to be killed.

    What it has imported for some scripts, others find there as well.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self._stop)

    def run(self, imported: Sequence[str], request: list[dict[str, Any]], timeout_s: float) -> list[int]:
        if self._process is None:
            variables = os.environ | NO_GPU | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
            paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            variables |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}  # this library, wherever another is
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
            self._process = subprocess.Popen([sys.executable, *STRICT, __file__], text=True, env=variables, **pipes)
        answers = self._process.stdout
        self._process.stdin.write(json.dumps([*imported]) + "\t" + json.dumps(request) + "\n")
        self._process.stdin.flush()
        try:
            if not select.select([answers], [], [], timeout_s)[0]:
                raise TimeoutError(f"not done after {timeout_s:.0f} s: {[one['script'] for one in request]}")
            answer = answers.readline()
            if not answer:
                raise RuntimeError(f"the process that imports {', '.join(imported)} has failed")
            codes: list[int] = json.loads(answer)
        except BaseException:
            self._stop()
            raise
        return codes

    def _stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with all that was forked
            self._process.communicate()
            self._process = None


_nursery = _Nursery()


def _serve(answers: int) -> dict[str, Any]:
    """Import what each request names, and fork its scripts; returns in the forks, with what to become."""
    for line in sys.stdin:
        imported, request = map(json.loads, line.split("\t"))
        if missing := [name for name in imported if name not in sys.modules]:
            for name in missing:
                with warnings.catch_warnings():
                    if name != "offload":  # PyTorch's compiler imports what PyTorch's own decorator warns of
                        warnings.simplefilter("ignore")
                    importlib.import_module(name)
            # A fork that looked through all this, if only to end, would copy it: a second each.
            gc.collect()
            gc.freeze()
        children = []
        for one in request:
            child = os.fork()
            if not child:
                os.close(answers)
                return one
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.write(answers, json.dumps(codes).encode() + b"\n")
    sys.exit()


def _become(one: dict[str, Any]) -> None:
    script = one["script"][0]
    sys.argv = one["script"]
    os.chdir(one["folder"])
    os.environ.clear()
    os.environ.update(one["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(one["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for there, here in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(there, here)
    # In place of this file's folder.
    sys.path[:1] = [str(Path(script).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if not one["strict"]:
        warnings.resetwarnings()
    code = compile(Path(script).read_bytes(), script, "exec")
    main, end = vars(sys.modules["__main__"]), _end
    fresh = {"__name__": "__main__", "__file__": script, "__builtins__": builtins, "__spec__": None}
    main.clear()
    main.update(fresh)
    exec(code, main)
    if not one["whole_end"]:
        end()


def _end(
    flush: Sequence[Any] = (sys.stdout, sys.stderr),
    ending: Sequence[Any] = (threading._shutdown, atexit._run_exitfuncs),
    leave: Any = os._exit,
) -> None:
    """What the interpreter does for a program that has ended, as far as the program can see it."""
    for step in (*ending, *(stream.flush for stream in flush)):
        step()
    leave(0)


if __name__ == "__main__":
    # What modules print while they are imported is no answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    _become(_serve(answers))
