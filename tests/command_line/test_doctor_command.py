"""``python -m offload doctor``: what it finds, and what it says to do about it."""

import json

import pytest
import torch

import offload
from offload.command_line import doctor, machine
from offload.command_line.doctor import Check, report
from offload.command_line.machine import Bus
from offload.command_line.main import main
from offload.device.select import get_backend
from offload.host.page_locked import HostMemoryError, memory_groups

GIB = 1 << 30
CPU = torch.device("cpu")


def test_works_without_a_gpu(capsys, monkeypatch):
    for name in (*doctor.SLOWS, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    status = main(["doctor", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["offload"], found["version"]) == ("doctor", 1)
    by_name = {check["name"]: check for check in found["checks"]}
    assert list(by_name) == [
        "torch",
        "device",
        "driver",
        "locked memory",
        "control group",
        "host memory",
        "NUMA node",
        "allocator",
        "link",
    ]
    assert "saves no memory" in by_name["device"]["found"]
    assert "the CPU needs none" in by_name["locked memory"]["found"]
    assert by_name["link"]["found"].startswith("cpu: d2h ")
    warned = [check for check in found["checks"] if check["state"] == "warning"]
    assert all(check["remedy"] for check in warned)
    assert (status, found["ok"]) == (int(bool(warned)), not warned)


def test_a_warning_is_status_1_and_has_a_remedy(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert main(["doctor", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "warning  CUDA_LAUNCH_BLOCKING  1\n" in text
    assert "To do: unset it: the host waits" in text
    assert text.rstrip().endswith(("1 warning", "warnings"))


def test_all_is_well():
    answer = report([Check("torch", "2.13.0"), Check("link", "fast")])
    assert str(answer) == "ok       torch  2.13.0\nok       link   fast\nall is well"
    assert answer.ok
    assert str(report([Check("link", "slow", "look")] * 2)).endswith("To do: look.\n2 warnings")


@pytest.mark.parametrize(
    ("check", "remedy"),
    [
        (doctor.build("2.13.0", "13.0", has_driver=True), ""),
        (doctor.build("2.13.0+cpu", None, has_driver=False), ""),
        (doctor.build("2.13.0+cpu", None, has_driver=True), "install PyTorch for CUDA"),
        (doctor.driver(None, None, None), ""),
        (doctor.driver("580.95.05", (13, 0), "13.0"), ""),
        (doctor.driver("570.10", (12, 8), "12.9"), ""),  # minor versions go with each other
        (doctor.driver("570.10", (12, 8), "13.0"), "update the driver to one for CUDA 13.0, or install PyTorch for"),
        (doctor.groups([], 64 * GIB, 8 * GIB), ""),
        (doctor.groups([(1 << 62, GIB)], 64 * GIB, 80 * GIB), ""),  # the first version of control groups says so
        (doctor.groups([(60 * GIB, GIB)], 64 * GIB, 80 * GIB), ""),
        (doctor.groups([(60 * GIB, GIB), (40 * GIB, 20 * GIB)], 64 * GIB, 80 * GIB), "raise it: docker run --memory"),
        (doctor.host(50 * GIB, 64 * GIB, 80 * GIB), ""),
        (doctor.host(30 * GIB, 64 * GIB, 80 * GIB), "free host memory"),
        (doctor.host(None, None, 80 * GIB), ""),
        (doctor.numa(None, {0, 1}), ""),
    ],
)
def test_says_what_to_do(check, remedy):
    assert check.remedy.startswith(remedy)
    assert check.state == ("warning" if remedy else "ok")


def test_names_the_group_that_leaves_the_least():
    assert (
        "limit 40.00 GiB, 20.00 GiB in use" in doctor.groups([(60 * GIB, GIB), (40 * GIB, 20 * GIB)], None, GIB).found
    )


def test_a_gpu_that_pytorch_does_not_see(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA_VISIBLE_DEVICES" in doctor.used_device(CPU, GIB, "13.0", has_driver=True).remedy
    assert not doctor.used_device(CPU, GIB, "13.0", has_driver=False).remedy
    assert not doctor.used_device(CPU, GIB, None, has_driver=True).remedy  # that is the build's


class Accelerator:
    device = torch.device("cuda:0")


def test_tries_to_lock_more_than_the_limit(monkeypatch):
    tried = []
    monkeypatch.setattr(doctor, "page_locked", lambda nbytes, backend: tried.append(nbytes))
    check = doctor.locked(8 << 20, Accelerator())
    assert tried == [72 << 20]
    assert "could be locked, so the driver does not keep to it" in check.found
    assert not check.remedy
    assert not doctor.locked(None, Accelerator()).remedy
    assert tried[1] == GIB

    def refuse(nbytes, backend):
        raise HostMemoryError("The CUDA driver could not page-lock 72 MiB.")

    monkeypatch.setattr(doctor, "page_locked", refuse)
    assert "--ulimit memlock=-1" in doctor.locked(8 << 20, Accelerator()).remedy


def test_names_the_cores_next_to_the_gpu(tmp_path):
    node = tmp_path / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("4-6,12\n")
    assert machine.cores_of(1, tmp_path) == {4, 5, 6, 12}
    assert not doctor.numa(1, {4, 12}, tmp_path).remedy
    check = doctor.numa(1, {0, 1, 4}, tmp_path)
    assert check.found == "1, but the process may run on cores 0-1, 4"
    assert "numactl --cpunodebind=1 --preferred=1" in check.remedy
    assert "taskset --cpu-list 4-6,12 " in check.remedy
    assert not doctor.numa(3, {0}, tmp_path).remedy  # nobody says which those are


def test_reads_the_allocators_settings():
    [check] = doctor.settings({})
    assert (check.name, check.state) == ("allocator", "ok")
    [check] = doctor.settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_LAUNCH_BLOCKING": "0"})
    assert (check.found, check.remedy) == ("expandable_segments:True", "")
    check, slow = doctor.settings(
        {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTORCH_ALLOC_CONF": "backend:native",
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        }
    )
    assert check.found == "backend:native"
    assert "unset PYTORCH_CUDA_ALLOC_CONF" in check.remedy
    assert (slow.name, slow.state) == ("PYTORCH_NO_CUDA_MEMORY_CACHING", "warning")


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
    assert doctor.compare(offload.Link(rate, rate, 2 * rate, "cuda:0"), bus).remedy.startswith(remedy)


def test_a_link_that_cannot_be_measured(monkeypatch):
    def refuse(device):
        raise HostMemoryError("64.00 MiB are missing; free host memory.")

    monkeypatch.setattr(doctor, "measure_link", refuse)
    assert doctor.link(get_backend("cpu"), None) == Check(
        "link", "not measured", "64.00 MiB are missing; free host memory"
    )


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
        ("NVRM version: something new\n", "of an unknown version"),
    ],
)
def test_reads_the_drivers_version(text, version, tmp_path):
    assert machine.driver_version(tmp_path) is None
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert machine.driver_version(tmp_path) == version


def test_reads_memory(tmp_path):
    assert machine.memory_total(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16 kB\nMemAvailable:   8 kB\n")
    assert machine.memory_total(tmp_path) == 16 << 10
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    for name, text in {"memory.max": "4096", "memory.current": "3000", "memory.stat": "active_file 1000\n"}.items():
        (group / name).write_text(text)
    assert [*memory_groups(tmp_path)] == [(4096, 2000)]


@pytest.mark.gpu
def test_examines_a_gpu(capsys):
    main(["doctor", "--json"])
    by_name = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "(cuda:0), " in by_name["device"]["found"]
    assert by_name["driver"]["found"][0].isdigit()
    assert by_name["driver"]["state"] == by_name["torch"]["state"] == by_name["locked memory"]["state"] == "ok"
