"""``python -m offload``: its options, the exit status, and errors in one line."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from offload.command_line.main import main


@pytest.mark.slow
def test_has_a_script_and_a_version(capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"offload": "offload.command_line.main:main"}
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    module = subprocess.run([sys.executable, "-m", "offload", "--version"], capture_output=True, check=True, text=True)
    assert capsys.readouterr().out == module.stdout == f"offload {project['version']}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--memory 8GiB --set layers=2", "--set must be NAME=VALUE with a"),
        ("--memory 8GiB --lora 0", "--lora must be at least 1, got 0"),
        ("--memory 8GiB --tokens 0", "--tokens must be at least 1, got 0"),
        ("--memory 8GiB --batch -1", "--batch must be at least 1, got -1"),
        ("--memory 8GiB --optimizer-bytes -1", "--optimizer-bytes must be at least 0, got -1"),
        ("--memory 8GiB --bandwidth 0", "bandwidth must be a positive, finite number, got 0.0"),
        ("--memory 8GiB --flops nan", "flops must be a positive, finite number, got nan"),
    ],
)
def test_what_cannot_be_answered_is_one_line(words, said, capsys):
    assert main(["plan", "llama", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"offload plan: {said}")
    assert error.count("\n") == 1


SIZE = "must be a number and a unit, such as '40GiB', got"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--memory 1MibB", f"argument --memory: {SIZE} '1MibB'"),
        ("--memory 80", f"argument --memory: {SIZE} '80'"),
        ("--memory=-5GiB", f"argument --memory: {SIZE} '-5GiB'"),
        ("--memory 8GiB --host-memory 64", f"argument --host-memory: {SIZE} '64'"),
        ("--link 26", f"argument --link: {SIZE} '26'"),
        ("--tokens x", "argument --tokens: invalid int value: 'x'"),
    ],
)
def test_wrong_options_are_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "llama", *words.split()])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
