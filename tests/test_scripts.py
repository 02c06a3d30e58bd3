"""A forked script is what a fresh process is, but for the modules that it need not import."""

import os
from pathlib import Path

import pytest
from scripts import NO_GPU, Done, run_scripts

pytestmark = pytest.mark.slow

IMPORTED = ("json", "threading")  # what takes no time

SCRIPT = """
import atexit, os, sys, threading, warnings

def later():
    print("at the end", __name__, os.environ["SAID"])

atexit.register(later)
print(sys.argv[1:], __file__ == sys.argv[0], os.getcwd(), sys.path[0], repr(sys.stdin.read()))
print([name for name in globals() if name[0] != "_"])
if "warn" in sys.argv:
    warnings.warn("careful")
threading.Timer(0.05, print, ["threads end first"]).start()
if sys.argv[1] != "0":
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("strict", "whole_end"), [(False, True), (True, True), (False, False)])
def test_forked_as_started_afresh(tmp_path: Path, strict: bool, whole_end: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    calls = [[str(script), "0"], [str(script), "3"], [str(script), "0", "warn"]]
    afresh = {name: value for name, value in os.environ.items() if name not in NO_GPU} | {"SAID": "this"}
    expected, found = (
        run_scripts(calls, tmp_path, way, imported=IMPORTED, strict=strict, whole_end=whole_end)
        for way in (afresh, afresh | NO_GPU)
    )
    assert [one.code for one in found] == [one.code for one in expected] == [0, 3, int(strict)]
    assert found[:2] == expected[:2]
    assert "threads end first\nat the end __main__ this" in found[1].output
    assert all("UserWarning: careful" in one.output for one in (found[2], expected[2]))


def test_what_hangs_is_given_up_and_the_next_runs(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    (tmp_path / "works.py").write_text("import sys; print('json' in sys.modules)")
    environment = os.environ | NO_GPU
    with pytest.raises(TimeoutError, match=r"hangs\.py"):
        run_scripts([[str(tmp_path / "hangs.py")]], tmp_path, environment, imported=IMPORTED, timeout_s=0.1)
    assert run_scripts([[str(tmp_path / "works.py")]], tmp_path, environment, imported=IMPORTED) == [Done(0, "True\n")]
