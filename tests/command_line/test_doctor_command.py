"""``python -m offload doctor``: what it finds, and what it says to do about it."""

import json
import resource

import pytest
import torch

import offload
from offload.command_line import doctor
from offload.command_line.doctor import Check
from offload.command_line.link import Bus
from offload.command_line.main import main
from offload.host.page_locked import HostMemoryError, memory_groups

GIB = 1 << 30
ADDRESS = "0000:17:00.0"


@pytest.fixture(autouse=True)
def _usual_variables(monkeypatch):
    for name in (*doctor.SLOWS, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_works_without_a_gpu(capsys):
    status = main(["doctor", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["offload"], found["version"]) == ("doctor", 1)
    by_name = {check["name"]: check for check in found["checks"]}
    names = "torch, device, driver, locked memory, control group, host memory, NUMA node, allocator, link"
    assert ", ".join(by_name) == names
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
            [Check("torch", "2.13"), Check("link", "fast")],
            0,
            "ok       torch  2.13\nok       link   fast\nall is well\n",
        ),
        ([Check("link", "slow", "look")], 1, "warning  link  slow\n               To do: look.\n1 warning\n"),
        ([Check("link", "slow", "look")] * 2, 1, "To do: look.\n2 warnings\n"),
    ],
)
def test_a_warning_is_status_1(checks, status, text, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda _: checks)
    assert main(["doctor", "--device", "cpu"]) == status
    assert capsys.readouterr().out.endswith(text)


@pytest.mark.parametrize(
    ("check", "remedy"),
    [
        (doctor.group_check([], 64 * GIB, 8 * GIB), ""),
        (doctor.group_check([(1 << 62, GIB)], 64 * GIB, 80 * GIB), ""),  # no limit, in the first version of groups
        (doctor.group_check([(60 * GIB, GIB)], 64 * GIB, 80 * GIB), ""),
        (doctor.group_check([(60 * GIB, GIB), (40 * GIB, 20 * GIB)], 64 * GIB, 80 * GIB), "raise it: docker run --mem"),
        (doctor.host_check(50 * GIB, 64 * GIB, 80 * GIB), ""),
        (doctor.host_check(30 * GIB, 64 * GIB, 80 * GIB), "free host memory"),
        (doctor.host_check(None, 64 * GIB, 80 * GIB), ""),
        (doctor.numa_check(None, {0, 1}), ""),
    ],
)
def test_says_what_to_do(check, remedy):
    assert check.remedy.startswith(remedy)
    assert check.state == ("warning" if remedy else "ok")


def test_names_the_group_with_the_least_memory_left():
    check = doctor.group_check([(60 * GIB, GIB), (40 * GIB, 20 * GIB)], 64 * GIB, GIB)
    assert check.found == "limit 40.00 GiB, 20.00 GiB in use"


@pytest.mark.parametrize(
    ("cuda", "driver", "torch_remedy", "device_remedy"),
    [
        ("13.0", "580.95.05", "", "see CUDA_VISIBLE_DEVICES and the driver, as PyTorch finds no GPU: too old"),
        ("13.0", None, "", ""),
        (None, "580.95.05", "install PyTorch for CUDA", ""),
        (None, None, "", ""),
    ],
)
def test_a_gpu_that_pytorch_does_not_see(cuda, driver, torch_remedy, device_remedy, monkeypatch):
    def fail():
        raise RuntimeError("too old.")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    checks = {check.name: check for check in doctor.examine(offload.device.select.get_backend("cpu"))}
    assert checks["torch"].found.endswith("for CUDA 13.0" if cuda else "without CUDA")
    for name, remedy in (("torch", torch_remedy), ("device", device_remedy)):
        assert checks[name].remedy.startswith(remedy)
        assert bool(checks[name].remedy) is bool(remedy)
    assert checks["driver"].found == (driver or "none of NVIDIA's")


class Accelerator:
    device = torch.device("cuda:0")


def test_tries_to_lock_more_than_the_limit(monkeypatch):
    tried = []
    monkeypatch.setattr(doctor, "page_locked", lambda nbytes, backend: tried.append(nbytes))
    check = doctor.locked_check(8 << 20, Accelerator())
    assert check.found == "limit 8.00 MiB (ulimit -l); 72.00 MiB could be locked, so the driver ignores the limit"
    assert not check.remedy
    assert doctor.locked_check(resource.RLIM_INFINITY, Accelerator()).found == "no limit; 1.00 GiB could be locked"
    assert tried == [72 << 20, GIB]

    def refuse(nbytes, backend):
        raise HostMemoryError("The CUDA driver could not page-lock 72 MiB.")

    monkeypatch.setattr(doctor, "page_locked", refuse)
    assert "--ulimit memlock=-1" in doctor.locked_check(8 << 20, Accelerator()).remedy


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_names_the_cores_next_to_the_gpu(tmp_path):
    assert doctor.numa_check(ADDRESS, {0}, tmp_path).found == "the device has none"
    node = tmp_path / "sys/bus/pci/devices" / ADDRESS / "numa_node"
    write(node, "-1\n")
    assert doctor.numa_check(ADDRESS, {0}, tmp_path).found == "the device has none"
    write(node, "1\n")
    assert not doctor.numa_check(ADDRESS, {0}, tmp_path).remedy  # the system does not say which cores those are
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "4-6,12\n")
    for own in ({4, 12}, {4, 5, 6, 12}):
        assert not doctor.numa_check(ADDRESS, own, tmp_path).remedy
    check = doctor.numa_check(ADDRESS, {0, 1, 4}, tmp_path)
    assert check.found == "1, but the process may run on cores 0-1, 4"
    assert "numactl --cpunodebind=1 --preferred=1" in check.remedy
    assert "taskset --cpu-list 4-6,12 " in check.remedy


OLD, NEW, CACHE = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"allocator": ("the default", "")}),
        ({OLD: "segments", "CUDA_LAUNCH_BLOCKING": "0"}, {"allocator": ("segments", "")}),
        ({OLD: "one", NEW: "two"}, {"allocator": ("two", "unset PYTORCH_CUDA_ALLOC_CONF")}),
        ({OLD: "one", NEW: "one", CACHE: "1"}, {"allocator": ("one", ""), CACHE: ("1", "unset it: every allocation")}),
    ],
)
def test_reads_environment_variables(variables, expected):
    found = {check.name: check for check in doctor.variable_checks(variables)}
    assert found.keys() == expected.keys()
    for name, (text, remedy) in expected.items():
        assert found[name].found.startswith(text)
        assert found[name].remedy.startswith(remedy)
        assert bool(found[name].remedy) is bool(remedy)


@pytest.mark.parametrize(
    ("rate", "bus", "remedy"),
    [
        (55.4e9, Bus(5, 16, 16), ""),
        (55.4e9, None, ""),
        (27e9, Bus(5, 16, 16), "look at the NUMA node"),
        (27e9, Bus(5, 16, 8), "see to the slot: 8 of 16 lanes are in use"),
    ],
)
def test_compares_the_link(rate, bus, remedy):
    check = doctor.link_check(offload.Link(rate, rate, 2 * rate, "cuda:0"), bus)
    assert check.remedy.startswith(remedy)
    assert bool(check.remedy) is bool(remedy)


def test_a_link_that_cannot_be_measured(monkeypatch):
    def refuse(device):
        raise HostMemoryError("64.00 MiB are missing; free host memory.")

    monkeypatch.setattr(doctor, "measure_link", refuse)
    [*_, check] = doctor.examine(offload.device.select.get_backend("cpu"))
    assert check == Check("link", "not measured", "64.00 MiB are missing; free host memory")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
        ("NVRM version: something new\n", "of an unknown version"),
    ],
)
def test_reads_the_drivers_version(text, version, tmp_path):
    assert doctor.driver_version(tmp_path) is None
    write(tmp_path / "proc/driver/nvidia/version", text)
    assert doctor.driver_version(tmp_path) == version


def test_reads_control_groups(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    for name, text in {"memory.max": "4096", "memory.current": "3000", "memory.stat": "active_file 1000\n"}.items():
        write(tmp_path / "sys/fs/cgroup/job" / name, text)
    assert [*memory_groups(tmp_path)] == [(4096, 2000)]


@pytest.mark.gpu
def test_examines_a_gpu(capsys):
    main(["doctor", "--json"])
    by_name = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "(cuda:0), " in by_name["device"]["found"]
    assert by_name["driver"]["found"][0].isdigit()
    assert by_name["driver"]["state"] == by_name["torch"]["state"] == by_name["locked memory"]["state"] == "ok"
