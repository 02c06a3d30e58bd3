"""Cases in a process of their own: what crashes, hangs or raises is a result, and the next case runs."""

import os
import time
from dataclasses import dataclass

import pytest

from .workers import run_cases

pytestmark = pytest.mark.slow


@dataclass
class Answer:
    value: int


def answer(what: str) -> Answer:
    if what == "dies":
        os._exit(3)
    if what == "hangs":
        time.sleep(600)
    if what == "raises":
        raise ValueError("no")
    return Answer(7)


@pytest.mark.parametrize("processes", [1, 3])
def test_each_case_has_a_result(processes: int) -> None:
    cases = [("works",), ("dies",), ("raises",), ("works",)]
    reports = run_cases("test_workers.answer", cases, 60, processes)
    found = [report.get("value") or report["lost"] for _, report in reports]
    assert found == [7, "the process died with exit code 3", "ValueError: no", 7]


def test_what_hangs_is_given_up() -> None:
    found = dict(run_cases("test_workers.answer", [("hangs",)], 0.1))
    assert found == {("hangs",): {"lost": "not done after 0 s"}}
