"""``python -m offload doctor``: what it finds, what to do about it, and what all commands share."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import offload
from offload.command_line import machine
from offload.command_line.machine import Bus, MachineCheck, bus_of
from offload.command_line.main import main
from offload.host.page_locked import HostMemoryError

GIB = 1 << 30
ADDRESS = "0000:17:00.0"
MEASURED = ["doctor", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _usual_variables(monkeypatch):
    for name in machine.SLOW_VARIABLES:
        monkeypatch.delenv(name, raising=False)


# --- All commands ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_as_a_module_which_the_library_does_not_import():
    done = subprocess.run([sys.executable, "-m", "offload", *MEASURED, "--json"], capture_output=True, check=False)
    assert json.loads(done.stdout)["offload"] == "doctor"
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
        (["doctor", "--device", "meta"], "offload doctor: device must be on this machine"),
        (["plan", "llama", "--memory", "8GiB", "--set", "layers=2"], "offload plan: --set must be NAME=VALUE with a"),
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
        ("doctor --device tpu:0", "argument --device: Expected one of cpu, cuda"),
        ("plan llama --memory 1MibB", f"argument --memory: {SIZE} '1MibB'"),
        ("plan llama --memory 80", f"argument --memory: {SIZE} '80'"),
        ("plan llama --memory=-5GiB", f"argument --memory: {SIZE} '-5GiB'"),
        ("plan llama --memory 8GiB --host-memory 64", f"argument --host-memory: {SIZE} '64'"),
        ("plan llama --link 26", f"argument --link: {SIZE} '26'"),
        ("plan llama --lora 0", "argument --lora: must be a whole number, at least 1, got '0'"),
        ("plan llama --tokens x", "argument --tokens: must be a whole number, at least 1, got 'x'"),
        ("plan llama --optimizer-bytes -1", "argument --optimizer-bytes: must be a whole number, at least 0, got '-1'"),
        ("plan llama --bandwidth 0", "argument --bandwidth: must be a number above 0, such as 630e12, got '0'"),
        ("plan llama --flops nan", "argument --flops: must be a number above 0, such as 630e12, got 'nan'"),
    ],
)
def test_wrong_options_are_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words.split())
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


# --- doctor ------------------------------------------------------------------------------------------------------


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


def test_works_without_a_gpu(capsys):
    status = main(["doctor", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["offload"], found["version"]) == ("doctor", 1)
    by_name = {check["name"]: check for check in found["checks"]}
    assert ", ".join(by_name) == "torch, device, locked memory, host memory, NUMA node, link"
    assert by_name["torch"]["found"].startswith(f"{torch.__version__}, ")
    assert "saves no memory" in by_name["device"]["found"]
    assert "the CPU needs none" in by_name["locked memory"]["found"]
    assert by_name["link"]["found"].startswith("cpu: d2h ")
    warned = [check for check in found["checks"] if check["state"] == "warning"]
    assert all(check["remedy"] for check in warned)
    assert (status, found["ok"]) == (int(bool(warned)), not warned)


@pytest.mark.parametrize(
    ("checks", "status", "text"),
    [
        (
            [MachineCheck("torch", "2.13"), MachineCheck("link", "fast")],
            0,
            "ok       torch  2.13\nok       link   fast\nall is well\n",
        ),
        ([MachineCheck("link", "slow", "look")], 1, "warning  link  slow\n               To do: look.\n1 warning\n"),
        ([MachineCheck("link", "slow", "look")] * 2, 1, "To do: look.\n2 warnings\n"),
    ],
)
def test_a_warning_is_status_1(checks, status, text, capsys, monkeypatch):
    monkeypatch.setattr(machine, "examine", lambda _: checks)
    assert main(["doctor", "--device", "cpu"]) == status
    assert capsys.readouterr().out.endswith(text)


def test_host_memory_of_half_the_device_is_enough():
    assert machine.host_check(50 * GIB, 80 * GIB) == MachineCheck("host memory", "50.00 GiB left")
    assert "docker run --memory" in machine.host_check(30 * GIB, 80 * GIB).remedy
    assert not machine.host_check(None, 80 * GIB).remedy


def test_a_gpu_that_pytorch_does_not_see(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    backend = offload.device.select.get_backend("cpu")
    assert not {check.name: check for check in machine.examine(backend)}["device"].remedy
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    remedy = {check.name: check for check in machine.examine(backend)}["device"].remedy
    assert remedy.startswith("install PyTorch for CUDA, and see CUDA_VISIBLE_DEVICES")


class Accelerator:
    device = torch.device("cuda:0")


def test_says_how_to_lock_more(monkeypatch):
    def refuse(nbytes, backend):
        raise HostMemoryError("The CUDA driver could not page-lock 1 GiB.")

    monkeypatch.setattr(machine, "page_locked", lambda nbytes, backend: None)
    assert machine.locked_check(Accelerator()) == MachineCheck("locked memory", "1.00 GiB could be locked")
    monkeypatch.setattr(machine, "page_locked", refuse)
    assert "--ulimit memlock=-1" in machine.locked_check(Accelerator()).remedy


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_names_the_cores_next_to_the_gpu(tmp_path):
    assert not machine.numa_check(None, {0, 1}).remedy
    assert machine.numa_check(ADDRESS, {0}, tmp_path).found == "the device has none"
    node = tmp_path / "sys/bus/pci/devices" / ADDRESS / "numa_node"
    write(node, "-1\n")
    assert machine.numa_check(ADDRESS, {0}, tmp_path).found == "the device has none"
    write(node, "1\n")
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "4-6,12\n")
    for own in ({4, 12}, {4, 5, 6, 12}):
        assert not machine.numa_check(ADDRESS, own, tmp_path).remedy
    check = machine.numa_check(ADDRESS, {0, 1, 4}, tmp_path)
    assert check.found == "1, but the process may run on cores 0-1, 4"
    assert "numactl --cpunodebind=1 --preferred=1" in check.remedy
    assert "taskset --cpu-list 4-6,12 " in check.remedy


def test_reads_environment_variables(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    found = {check.name: check for check in machine.examine(offload.device.select.get_backend("cpu"))}
    assert "CUDA_LAUNCH_BLOCKING" not in found
    assert found["PYTORCH_NO_CUDA_MEMORY_CACHING"].remedy.startswith("unset it: every allocation")


@pytest.mark.parametrize(
    ("rate", "bus", "remedy"),
    [
        (55.4e9, Bus(5, 16, 16), ""),
        (55.4e9, None, ""),
        (350e9, Bus(5, 16, 16), ""),
        (27e9, Bus(5, 16, 16), "look at the NUMA node"),
        (27e9, Bus(5, 16, 8), "see to the slot: 8 of 16 lanes are in use"),
    ],
)
def test_compares_the_link(rate, bus, remedy):
    check = machine.link_check(offload.Link(rate, rate, 2 * rate, "cuda:0"), bus)
    assert check.remedy.startswith(remedy)
    assert bool(check.remedy) is bool(remedy)
    assert ("another link" in check.found) is (rate == 350e9)
    assert ("88% of PCIe Gen5 x16, 63.0 GB/s each way" in check.found) is (bus is not None and rate == 55.4e9)


def test_a_link_that_cannot_be_measured(monkeypatch):
    def refuse(device):
        raise HostMemoryError("64.00 MiB are missing; free host memory.")

    monkeypatch.setattr(machine, "measure_link", refuse)
    [*_, check] = machine.examine(offload.device.select.get_backend("cpu"))
    assert check == MachineCheck("link", "not measured", "64.00 MiB are missing; free host memory")


@pytest.mark.gpu
def test_examines_a_gpu(capsys):
    main(["doctor", "--json"])
    by_name = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "(cuda:0), " in by_name["device"]["found"]
    assert by_name["device"]["state"] == by_name["locked memory"]["state"] == "ok"
