"""The memory meter: the peak of device memory above what was there before."""

import pytest
import torch
from faults import in_threads

from offload import memory_meter
from offload.observe.memory import memory_peak

KIB = 1024


def kib(count: float, device: torch.device) -> torch.Tensor:
    return torch.zeros(int(count * KIB), dtype=torch.uint8, device=device)


def test_peak_not_sum_and_final_when_the_block_is_left(device: torch.device) -> None:
    with memory_meter(device) as meter:
        first = kib(64, device)
        del first
        second = kib(32, device)
        third = kib(16, device)
    kib(128, device)
    assert meter.peak_bytes == 64 * KIB
    assert len(second) + len(third) == 48 * KIB
    with memory_meter(device) as meter:
        pass
    assert meter.peak_bytes == 0
    with pytest.raises(RuntimeError, match="shape"), memory_meter(device) as meter:
        kib(16, device).view(3, -1)
    assert meter.peak_bytes == 16 * KIB


def test_what_was_there_before_does_not_count(device: torch.device) -> None:
    before = kib(64, device)
    with memory_meter(device) as meter:
        after = before[: 16 * KIB] + 1
        del before
    assert meter.peak_bytes == 16 * KIB
    assert len(after) == 16 * KIB


def test_views_changes_in_place_and_memory_of_another_tensor_take_nothing(device: torch.device) -> None:
    before = kib(64, device)
    with memory_meter(device) as meter:
        tensor = kib(64, device)
        tensor.add_(1)
        tensor.view(2, -1).t()[3:].expand(2, -1, -1)
        tensor[::2].zero_()
        other = torch.empty(0, dtype=torch.uint8, device=device)
        other.set_(before.untyped_storage(), 0, before.size(), before.stride())
    assert meter.peak_bytes == 64 * KIB
    assert other.data_ptr() == before.data_ptr()


def test_memory_that_two_results_share_counts_once(device: torch.device) -> None:
    with torch.library._scoped_library("offload_memory", "FRAGMENT") as library:
        library.define("halves(Tensor x) -> (Tensor, Tensor)")
        library.impl("halves", lambda x: (x + 1).chunk(2), "CompositeExplicitAutograd")
        before = kib(64, device)
        with memory_meter(device) as meter:
            halves = torch.ops.offload_memory.halves(before)
            del halves
            kib(16, device)
    assert meter.peak_bytes == 64 * KIB


def test_memory_freed_in_another_thread(device: torch.device) -> None:
    with memory_meter(device) as meter:
        held = [kib(32, device)]
        in_threads(held.clear)
        kib(32, device)
    assert meter.peak_bytes == 32 * KIB


def test_default_device() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with memory_meter() as meter:
        kib(16, device)
    assert meter.peak_bytes == 16 * KIB
    with pytest.raises(ValueError, match=r"device must be on this machine"), memory_meter("meta"):
        pass


def test_a_part_that_runs_apart_has_a_peak_of_its_own(device: torch.device) -> None:
    peak = memory_peak(device)
    peak.start()
    held = kib(16, device)
    kib(64, device)
    with peak.apart() as meter:
        kib(32, device)
    assert meter.peak_bytes == 48 * KIB
    assert peak.most_bytes() == 80 * KIB  # of before
    with peak.apart() as meter:
        kib(128, device)
    assert meter.peak_bytes == peak.most_bytes() == 144 * KIB
    peak.begin_part()
    assert peak.most_bytes() == len(held)
    peak.stop()
