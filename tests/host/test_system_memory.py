"""What the system can still give, as files in ``/proc`` and ``/sys`` tell."""

from pathlib import Path

import pytest

from offload.host.page_locked import available_bytes

GIB = 1 << 30


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 100 GiB left."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 1000000 kB\nMemAvailable:  {100 << 20} kB\nHugePages_Total: 0")
    return tmp_path


def group_v2(root: Path, name: str, limit: object, used: int, cache: int = 0) -> None:
    directory = root / "sys/fs/cgroup" / name
    write(directory / "memory.max", limit)
    write(directory / "memory.current", used)
    write(directory / "memory.stat", f"anon {used - cache}\nactive_file {cache // 2}\ninactive_file {cache // 2}")


def test_the_machine_without_groups(root: Path) -> None:
    assert available_bytes(root) == 100 * GIB


def test_a_group_s_limit_counts_without_its_file_cache(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/job")
    group_v2(root, "job", 64 * GIB, 50 * GIB, cache=20 * GIB)
    assert available_bytes(root) == 34 * GIB


def test_the_tightest_of_nested_groups_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user/job/task")
    group_v2(root, "user/job/task", "max", 10 * GIB)
    group_v2(root, "user/job", 64 * GIB, 60 * GIB)
    group_v2(root, "user", 128 * GIB, 60 * GIB)
    assert available_bytes(root) == 4 * GIB


def test_a_container_sees_its_own_group_at_the_top(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/")
    group_v2(root, "", 8 * GIB, 7 * GIB)
    assert available_bytes(root) == GIB


def test_the_first_version_of_control_groups(root: Path) -> None:
    write(root / "proc/self/cgroup", "12:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/")
    directory = root / "sys/fs/cgroup/memory"  # what a container sees of /docker/abc
    write(directory / "memory.limit_in_bytes", 16 * GIB)
    write(directory / "memory.usage_in_bytes", 10 * GIB)
    write(directory / "memory.stat", f"cache 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}")
    assert available_bytes(root) == 8 * GIB


def test_a_group_over_its_limit_has_nothing_left(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/")
    group_v2(root, "", 8 * GIB, 9 * GIB)
    assert available_bytes(root) == 0


@pytest.mark.parametrize("meminfo", [None, "MemTotal: 5 kB", "MemAvailable: lots"])
def test_a_system_that_does_not_say(tmp_path: Path, meminfo: str | None) -> None:
    if meminfo is not None:
        write(tmp_path / "proc/meminfo", meminfo)
    assert available_bytes(tmp_path) is None


def test_this_machine_has_some_left() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < (available_bytes() or 0) < total
