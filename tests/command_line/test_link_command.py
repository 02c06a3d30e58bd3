"""``python -m offload link``, what it reads about the bus, and what all commands have in common."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import offload
from offload.command_line.link import Bus, bus_of, describe_link
from offload.command_line.main import main

ADDRESS = "0000:17:00.0"
H200 = offload.Link(55.4e9, 55.5e9, 101.6e9, "cuda:0")
MEASURED = ["link", "--device", "cpu", "--piece", "64KiB"]


def test_measures_here(capsys):
    assert main([*MEASURED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["offload"], found["version"], found["ok"]) == ("link", 1, True)
    assert found["d2h_bytes_per_s"] > 0
    assert found["promised_bytes_per_s"] is found["ratio"] is None
    slower = min(found["d2h_bytes_per_s"], 2 * found["h2d_bytes_per_s"])
    assert found["free_flop_per_byte"] == found["flop_per_s"] / slower
    assert main(MEASURED) == 0
    text = capsys.readouterr().out
    assert text.startswith("device    the CPU,")
    assert "promised  unknown: there is no bus" in text


@pytest.mark.slow
def test_runs_as_a_module_which_the_library_does_not_import():
    done = subprocess.run([sys.executable, "-m", "offload", *MEASURED, "--json"], capture_output=True, check=True)
    assert json.loads(done.stdout)["offload"] == "link"
    code = "import sys, offload; assert 'offload.command_line' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_has_a_script_and_a_version(capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"offload": "offload.command_line.main:main"}
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"offload {project['version']}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["link", "--device", "meta"], "offload link: device must be on this machine"),
        (["link", "--piece", "0B"], "offload link: piece_bytes must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_answered_is_one_line(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


SIZE = "must be a number and a unit, such as '40GiB', got"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("link --device tpu:0", "argument --device: Expected one of cpu, cuda"),
        ("link --piece 1MibB", f"argument --piece: {SIZE} '1MibB'"),
        ("plan --memory 80", f"argument --memory: {SIZE} '80'"),
        ("plan --memory=-5GiB", f"argument --memory: {SIZE} '-5GiB'"),
        ("plan --memory -5GiB", f"argument --memory: {SIZE} '-5GiB'"),
        ("plan --memory 8GiB --host-memory 64", f"argument --host-memory: {SIZE} '64'"),
        ("plan --link 26", f"argument --link: {SIZE} '26'"),
        ("plan --layers 0", "argument --layers: must be a whole number, at least 1, got '0'"),
        ("plan --tokens x", "argument --tokens: must be a whole number, at least 1, got 'x'"),
        ("plan --optimizer-bytes -1", "argument --optimizer-bytes: must be a whole number, at least 0, got '-1'"),
        ("plan --flops -1", "argument --flops: must be a number above 0, such as 630e12, got '-1'"),
        ("plan --bandwidth 0", "argument --bandwidth: must be a number above 0, such as 630e12, got '0'"),
        ("plan --flops nan", "argument --flops: must be a number above 0, such as 630e12, got 'nan'"),
    ],
)
def test_wrong_options_are_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words.split())
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_compares_with_the_promise_of_the_bus():
    answer = describe_link("NVIDIA H200 (cuda:0)", H200, Bus(5, 16, 16), 785e12)
    assert answer.values["ratio"] == pytest.approx(55.4 / 63.016)
    assert "63.0 GB/s each way by PCIe Gen5 x16; reached 88%" in str(answer)
    assert "14,170 FLOP" in str(answer)
    assert "another link" not in str(answer)
    faster = describe_link("", offload.Link(350e9, 350e9, 700e9), Bus(5, 16, 16), 785e12)
    assert "another link" in str(faster)


@pytest.mark.parametrize(("h2d", "free"), [(40.0, 20.0), (10.0, 50.0)])
def test_reloads_have_twice_the_time_of_offloads(h2d, free):
    answer = describe_link("", offload.Link(50.0, h2d, 50.0 + h2d), None, 1000.0)
    assert answer.values["free_flop_per_byte"] == free


@pytest.mark.parametrize(
    ("script", "bus"),
    [
        ('echo "5, 16, 8"', Bus(5, 16, 8)),
        ('echo "[N/A], [N/A], [N/A]"', None),
        ('echo "9, 16, 16"', None),  # a generation of the future
        ('test "$1" = --id=0000:17:00.0 && echo "4, 8, 8"', Bus(4, 8, 8)),
        ("exit 6", None),
    ],
)
def test_asks_nvidia_smi_for_the_bus(script, bus, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bus_of(ADDRESS) is None  # there is no such tool
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert bus_of(ADDRESS) == bus
    assert bus_of(None) is None


@pytest.mark.gpu
def test_measures_a_gpu(capsys):
    assert main(["link", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"].endswith("(cuda:0)")
    assert found["flop_per_s"] > 1e12
    assert found["ratio"] is None or found["ratio"] > 0.3
