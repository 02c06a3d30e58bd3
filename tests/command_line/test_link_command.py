"""``python -m offload link``, and what it reads about the bus."""

import json
import subprocess
import sys

import pytest

import offload
from offload.command_line import machine
from offload.command_line.link import describe, free_flop_per_byte
from offload.command_line.main import main

ADDRESS = "0000:17:00.0"
H200 = offload.Link(55.4e9, 55.5e9, 101.6e9, "cuda:0")


def silent(address, fields):
    return None


def make_device(root, *, upper="16.0 GT/s PCIe", now="16"):
    """A card of Gen5 x16 behind a port, as Linux lists them."""
    port = root / "sys/devices/pci0000:16/0000:16:01.0"
    card = port / ADDRESS
    card.mkdir(parents=True)
    for end, speed in ((port, upper), (card, "32.0 GT/s PCIe")):
        (end / "max_link_speed").write_text(f"{speed}\n")
        (end / "max_link_width").write_text("16\n")
    (card / "current_link_width").write_text(f"{now}\n")
    (card / "numa_node").write_text("1\n")
    listed = root / "sys/bus/pci/devices"
    listed.mkdir(parents=True)
    (listed / ADDRESS).symlink_to(card)
    return card


def test_measures_here(capsys):
    assert main(["link", "--device", "cpu", "--piece", "1MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["offload"], found["version"], found["ok"]) == ("link", 1, True)
    assert found["d2h_bytes_per_s"] > 0
    assert found["promised_bytes_per_s"] is found["ratio"] is None
    assert found["free_flop_per_byte"] == found["flop_per_s"] / min(
        found["d2h_bytes_per_s"], 2 * found["h2d_bytes_per_s"]
    )


def test_says_that_it_is_the_cpu(capsys):
    assert main(["link", "--device", "cpu", "--piece", "1MiB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("device    the CPU,")
    assert "promised  unknown" in text


@pytest.mark.slow
def test_runs_as_a_module():
    command = [sys.executable, "-m", "offload", "link", "--device", "cpu", "--piece", "64KiB", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["offload"] == "link"


@pytest.mark.slow
def test_importing_the_library_imports_no_command():
    code = "import sys, offload; assert 'offload.command_line' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["link", "--device", "meta"], "offload link: device must be on this machine"),
        (["link", "--piece", "0"], "offload link: piece_bytes must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


def test_a_device_must_be_one(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["link", "--device", "tpu:0"])
    assert exit_.value.code == 2
    assert "argument --device: Expected one of cpu, cuda" in capsys.readouterr().err


def test_a_size_needs_a_unit_that_there_is(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["link", "--piece", "1 MibB"])
    assert exit_.value.code == 2
    assert "argument --piece: must be a number and a unit, such as '40GiB', got '1 MibB'" in capsys.readouterr().err


def test_compares_with_what_the_bus_promises():
    answer = describe("NVIDIA H200 (cuda:0)", H200, machine.Bus(5, 16), 785e12)
    assert answer.values["ratio"] == pytest.approx(55.4 / 63.016)
    assert "63.0 GB/s each way by PCIe Gen5 x16; reached 88%" in str(answer)
    assert "14,170 FLOP" in str(answer)
    assert "another link" not in str(answer)


def test_more_than_the_bus_promises_is_another_link():
    assert "another link" in str(describe("", offload.Link(350e9, 350e9, 700e9), machine.Bus(5, 16), 785e12))


def test_free_is_bound_by_the_way_out_unless_the_way_back_is_half_as_fast():
    assert free_flop_per_byte(offload.Link(50.0, 40.0, 90.0), 1000.0) == 20.0
    assert free_flop_per_byte(offload.Link(50.0, 10.0, 60.0), 1000.0) == 50.0


def test_a_bus_is_as_fast_as_its_slower_end(tmp_path):
    make_device(tmp_path)
    assert machine.bus_of(ADDRESS, tmp_path, silent) == machine.Bus(4, 16, 16)
    assert machine.numa_node(ADDRESS, tmp_path) == 1


def test_the_driver_knows_better(tmp_path):
    make_device(tmp_path)
    asked = []

    def ask(address, fields):
        asked.append((address, fields))
        return ["5", "16", "8"]

    assert machine.bus_of(ADDRESS, tmp_path, ask) == machine.Bus(5, 16, 8)
    assert asked == [(ADDRESS, "pcie.link.gen.max,pcie.link.width.max,pcie.link.width.current")]


@pytest.mark.parametrize("upper", ["Unknown", "7.0 GT/s"])
def test_an_end_that_says_nothing_does_not_count(tmp_path, upper):
    make_device(tmp_path, upper=upper)
    assert machine.bus_of(ADDRESS, tmp_path, lambda *_: ["[N/A]", "[N/A]", "[N/A]"]) == machine.Bus(5, 16, 16)


def test_nobody_says(tmp_path):
    assert machine.bus_of(ADDRESS, tmp_path, silent) is None
    assert machine.bus_of(None) is None
    assert machine.numa_node(ADDRESS, tmp_path) is None
    make_device(tmp_path)
    (tmp_path / "sys/bus/pci/devices" / ADDRESS / "max_link_width").write_text("255\n")
    assert machine.bus_of(ADDRESS, tmp_path, silent) is None
    (tmp_path / "sys/bus/pci/devices" / ADDRESS / "numa_node").write_text("-1\n")
    assert machine.numa_node(ADDRESS, tmp_path) is None


def test_asks_the_tool_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.ask_nvidia(ADDRESS, "driver_version") is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$1, $2, $3"\n')
    tool.chmod(0o755)
    assert machine.ask_nvidia(ADDRESS, "driver_version") == [
        f"--id={ADDRESS}",
        "--query-gpu=driver_version",
        "--format=csv",
        "noheader",
        "nounits",
    ]
    tool.write_text("#!/bin/sh\nexit 6\n")
    assert machine.ask_nvidia(ADDRESS, "driver_version") is None


@pytest.mark.gpu
def test_measures_a_gpu(capsys):
    assert main(["link", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"].endswith("(cuda:0)")
    assert found["flop_per_s"] > 1e12
    assert found["ratio"] is None or found["ratio"] > 0.3
