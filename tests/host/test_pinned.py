"""Host memory as the system gives it: locked while it is mapped, gone with its last tensor, not copied by a fork."""

import contextlib
import ctypes
import gc
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import mapped
from ranks import true_in_a_child

from offload.device.backend import PageLockError
from offload.device.cuda import CudaBackend
from offload.device.select import get_backend
from offload.host import page_locked as pinned
from offload.host.page_locked import HostMemoryError, available_bytes, forget_on_fork, page_locked

KIB, MIB = 1 << 10, 1 << 20


class Driver:
    """Stands for the CUDA driver, and remembers which ranges are locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, tuple[int, int]] = {}
        self.refuses = False
        self.asked_at: list[int] = []
        # Functions, as a bound method would not be given the backend.
        monkeypatch.setattr(CudaBackend, "page_lock", lambda backend, *pages: self.lock(backend, *pages))  # noqa: PLW0108
        monkeypatch.setattr(CudaBackend, "page_unlock", lambda backend, page: self.unlock(backend, page))  # noqa: PLW0108

    def lock(self, backend: CudaBackend, address: int, nbytes: int) -> None:
        self.asked_at.append(address)
        if self.refuses:
            raise PageLockError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY")
        self.locked[address] = (nbytes, backend.device.index)

    def unlock(self, backend: CudaBackend, address: int) -> None:
        assert mapped(address), "locked memory was given back to the system"
        assert self.locked.pop(address)[1] == backend.device.index


def backend(index: int = 0) -> CudaBackend:
    """One that asks the driver, made without the device."""
    made = CudaBackend.__new__(CudaBackend)
    made.device = torch.device("cuda", index)
    return made


def pageable(nbytes: int) -> torch.Tensor:
    """Memory that no driver locks."""
    return page_locked(nbytes, get_backend("cpu"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


@pytest.mark.parametrize(
    ("nbytes", "threads", "populate"), [(1, 3, True), (4096, 1, False), (3 * MIB + 1, 1, True), (3 * MIB + 1, 3, False)]
)
def test_memory_is_touched_to_its_end(
    nbytes: int, threads: int, populate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a system that cannot do so when asked, and however many threads share the work."""
    monkeypatch.setattr(pinned, "TOUCH_BYTES", 64 * KIB)
    monkeypatch.setattr(pinned, "own_cores", lambda: set(range(threads)))
    if not populate:
        monkeypatch.setattr(pinned, "_advise", lambda *_: False)
    memory = pageable(nbytes)
    assert memory.dtype is torch.uint8
    assert memory.shape == (nbytes,)
    assert memory.untyped_storage().nbytes() == nbytes
    assert memory.data_ptr() % 4096 == 0
    assert not memory.any()
    resident = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes), resident)
    assert all(page & 1 for page in resident)


def test_memory_is_unlocked_before_it_goes_and_only_then(driver: Driver) -> None:
    view = page_locked(MIB, backend(3))[4096:]
    address = view.data_ptr() - 4096
    assert driver.locked == {address: (MIB, 3)}
    del view
    assert driver.locked == {}
    assert not mapped(address)


def test_memory_that_the_driver_refuses_to_lock_is_not_kept(driver: Driver) -> None:
    driver.refuses = True
    with pytest.raises(HostMemoryError, match=r"could not page-lock 64.00 MiB \(.*OUT_OF_MEMORY\); free") as held:
        page_locked(64 * MIB, backend())
    assert not mapped(driver.asked_at[0] + 32 * MIB), "the error keeps the memory alive"
    assert held.value.__cause__ is None


def test_memory_is_unlocked_if_an_interrupt_comes_when_it_is_locked(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(backend: CudaBackend, address: int, nbytes: int) -> None:
        driver.lock(backend, address, nbytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(CudaBackend, "page_lock", lock)
    with pytest.raises(KeyboardInterrupt):
        page_locked(MIB, backend())
    gc.collect()  # of the traceback
    assert len(driver.asked_at) == 1
    assert driver.locked == {}


def test_memory_remains_while_a_thread_touches_it_that_an_interrupt_has_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted, found = threading.Event(), []
    threads: list[threading.Thread] = []

    class Interrupted(ThreadPoolExecutor):
        def map(self, touch: Any, starts: Any) -> Any:
            threads.append(threading.Thread(target=touch, args=(0,)))
            threads[0].start()
            raise KeyboardInterrupt

    def advise(address: int, nbytes: int, advice: int) -> bool:
        if threads:
            interrupted.wait(10)
            found.append(mapped(address))
        return True

    monkeypatch.setattr(pinned, "ThreadPoolExecutor", Interrupted)
    monkeypatch.setattr(pinned, "_advise", advise)
    with contextlib.suppress(KeyboardInterrupt):  # pytest.raises would hold the frame, with the mapping
        pageable(MIB)
    interrupted.set()
    threads[0].join()
    assert found == [True]


def test_more_than_the_system_has_left_is_refused_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: 5 * MIB)
    assert len(pageable(5 * MIB)) == 5 * MIB
    with pytest.raises(HostMemoryError, match=r"6.00 MiB of host memory are missing, but the system has 5.00 MiB left"):
        pageable(6 * MIB)


def test_a_mapping_that_cannot_be_made_is_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available_bytes", lambda: None)
    with pytest.raises(HostMemoryError, match=r"The system has no 1024.0 TiB of host memory left \(.*Cannot allocate"):
        pageable(1 << 50)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the child calls nothing of torch
class TestFork:
    def test_a_child_finds_zeros_where_it_should_forget(self) -> None:
        kept, forgotten = pageable(8192).fill_(7), forget_on_fork(pageable(8192).fill_(7))
        addresses = kept.data_ptr(), forgotten.data_ptr()

        def check() -> bool:
            there, gone = (ctypes.string_at(address, 8192) for address in addresses)
            return there == bytes([7] * 8192) and gone == bytes(8192)

        assert true_in_a_child(check)
        assert bool((forgotten == 7).all())

    def test_a_child_leaves_the_driver_alone(self, driver: Driver) -> None:
        memory = [page_locked(4096, backend())]

        def drop() -> bool:
            memory.clear()
            return len(driver.locked) == 1

        assert true_in_a_child(drop)
        assert memory
        drop()
        assert driver.locked == {}


@pytest.mark.gpu
class TestRealDriver:
    def test_pinned_memory_can_be_copied_to_and_from(self) -> None:
        host = page_locked(3 * MIB + 1, backend())
        assert host.is_pinned()
        assert host.untyped_storage().nbytes() == 3 * MIB + 1
        numbers = torch.arange(len(host), device="cuda").to(torch.uint8)
        host.copy_(numbers, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(host, numbers.cpu())

    def test_a_refused_registration_leaves_no_error_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lock = CudaBackend.page_lock

        def lock_twice(backend: CudaBackend, address: int, nbytes: int) -> None:
            lock(backend, address, nbytes)
            try:
                lock(backend, address, nbytes)
            finally:
                backend.page_unlock(address)

        monkeypatch.setattr(CudaBackend, "page_lock", lock_twice)
        with pytest.raises(HostMemoryError, match="CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
            page_locked(MIB, backend())
        # A launch reports the runtime's last error, whoever caused it.
        twice = torch.ones(1000, device="cuda") * 2
        torch.cuda.synchronize()
        assert twice.sum().item() == 2000
        assert pageable(4096).is_pinned() is False

    def test_a_thread_that_has_never_used_the_device_can_pin(self) -> None:
        with ThreadPoolExecutor(4) as threads:
            slabs = list(threads.map(lambda _: page_locked(MIB, backend()), range(8)))
        assert all(slab.is_pinned() for slab in slabs)


GIB = 1 << 30


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 128 GiB with 100 GiB left, of which it keeps 4."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {128 << 20} kB\nMemAvailable:  {100 << 20} kB\nHugePages_Total: 0")
    return tmp_path


def group_v2(root: Path, name: str, limit: object, used: int, cache: int = 0) -> None:
    directory = root / "sys/fs/cgroup" / name
    write(directory / "memory.max", limit)
    write(directory / "memory.current", used)
    write(directory / "memory.stat", f"anon {used - cache}\nactive_file {cache // 2}\ninactive_file {cache // 2}")


NESTED = [("user/job/task", "max", 10, 0), ("user/job", 64, 60, 0), ("user", 128, 60, 0)]
GROUPS: dict[str, tuple[str, list[tuple[str, Any, int, int]], float]] = {
    "a group's limit, without its file cache": ("0::/job", [("job", 64, 50, 20)], 32),
    "the tightest of nested groups": ("0::/user/job/task", NESTED, 2),
    "a container's own group, at the top": ("0::/", [("", 8, 7, 0)], 0.75),
    "a group over its limit": ("0::/", [("", 8, 9, 0)], 0),
}
"""Which group a process is in; each group's limit, memory and cache; what is left beside 1/32 of the limit; in GiB."""


@pytest.mark.parametrize(("own", "groups", "left"), GROUPS.values(), ids=list(GROUPS))
def test_control_groups(own: str, groups: list[tuple[str, Any, int, int]], left: float, root: Path) -> None:
    assert available_bytes(root) == 96 * GIB
    write(root / "proc/self/cgroup", own)
    for name, limit, used, cache in groups:
        group_v2(root, name, limit if limit == "max" else limit * GIB, used * GIB, cache * GIB)
    assert available_bytes(root) == left * GIB


def test_the_first_version_of_control_groups(root: Path) -> None:
    write(root / "proc/self/cgroup", "12:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/")
    directory = root / "sys/fs/cgroup/memory"  # what a container sees of /docker/abc
    write(directory / "memory.limit_in_bytes", 16 * GIB)
    write(directory / "memory.usage_in_bytes", 10 * GIB)
    write(directory / "memory.stat", f"cache 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}")
    assert available_bytes(root) == 7.5 * GIB


@pytest.mark.parametrize("meminfo", [None, "MemTotal: 5 kB", "MemAvailable: lots"])
def test_a_system_that_does_not_say(tmp_path: Path, meminfo: str | None) -> None:
    if meminfo is not None:
        write(tmp_path / "proc/meminfo", meminfo)
    assert available_bytes(tmp_path) is None


def test_this_machine_has_some_left() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < (available_bytes() or 0) < total
